"""The pages' tables, tree and paths say what the code says, and each page is in the list of pages."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from engine_features import ENGINE_FEATURES
from request_kinds import KINDS
from state_features import STATE_FEATURES

import inflight_kernels
from ci.dialect_models import APIS, made_files
from ci.feature_table import with_table
from ci.pictures import at_work, diagrams, survival
from ci.site.anchors import anchor
from ci.site.pages import LIST, all_pages
from ci.tree import with_descriptions
from inflight import config, errors, kv_cache_retention, lora, sampling_config
from inflight.batch_manager.speculation import ngram_index
from inflight.config import EngineConfig
from inflight.executor.front import prompt_adapters
from inflight.executor.postprocess import workers
from inflight.executor.wire import messages
from inflight.guides import limits as guide_limits
from inflight.metric_families import FAMILIES
from inflight.models.families import FAMILIES as ARCHITECTURES
from inflight.openai_options import SETTABLE
from inflight.request_limits import RequestLimits
from inflight.runtime.adapters import adapter_library, peft_folder
from inflight.runtime.guided import grammars
from inflight.server.tensors import processing, request_parameters, tensor_values
from inflight.server.tensors.dialect import InputTensor, OutputTensor
from inflight.server.tensors.dialects import LLM
from inflight.server.threads.vllm_metrics import vllm_families
from inflight_client import cli

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("backend", "ci", "client", "docs", "kernels", "model_repository", "scripts")
PAGES = sorted((*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))))
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "backend" / "ARCHITECTURE.md"
CONFIGURATION = ROOT / "backend" / "CONFIGURATION.md"
FEATURES = ROOT / "ci" / "FEATURES.md"
MODELS = ROOT / "backend" / "inflight" / "models" / "README.md"
MONITORING = ROOT / "backend" / "monitoring" / "README.md"
TENSORS = ROOT / "backend" / "inflight" / "server" / "README.md"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def section(page: Path, title: str) -> str:
    """What stands under a heading of the second level."""
    return text_of(page).split(f"\n## {title}\n")[1].split("\n## ")[0]


def tables(page: Path, first_column: str) -> list[list[str]]:
    """The rows of all tables of a page whose head begins with `first_column`, in their order; backticks are taken
    off."""
    _, *found = text_of(page).split(f"\n| {first_column} |")
    assert found, f"no table of {first_column} in {page}"
    lines = [line for each in found for line in each.split("\n\n")[0].splitlines()[2:]]
    return [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in lines]


@cache
def sentences() -> dict[str, str]:
    """Field of EngineConfig -> the sentence that stands under it."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineConfig")
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def shown(default: object) -> str:
    value = default.value if isinstance(default, Enum) else default
    return str(value).lower() if isinstance(value, bool) else str(value) or "unset"


def test_the_configuration_table_is_engine_config() -> None:
    expected = [[field.name, shown(field.default), sentences()[field.name]] for field in fields(EngineConfig)]
    assert tables(CONFIGURATION, "key") == expected
    named = set(re.findall(r"`(\w+)`", section(CONFIGURATION, "What most people set")))
    assert named and named <= {field.name for field in fields(EngineConfig)}


def test_the_comments_of_config_pbtxt_are_those_of_engine_config() -> None:
    text = (ROOT / "model_repository" / "llm" / "config.pbtxt").read_text(encoding="utf-8")
    found = re.findall(r'((?:^#.*\n)+)parameters \{ key: "(\w+)"', text, re.MULTILINE)
    comments = {key: " ".join(line.strip("# ") for line in comment.splitlines()) for comment, key in found}
    assert comments.keys() == sentences().keys()
    said = {key: sentence.partition(" (see ")[0] for key, sentence in sentences().items()}
    assert [key for key, sentence in said.items() if sentence not in comments[key]] == []


@pytest.mark.parametrize(("head", "tensors"), [("input", LLM.inputs), ("output", LLM.outputs)])
def test_the_tensor_tables_are_the_dialects(head: str, tensors: tuple[InputTensor | OutputTensor, ...]) -> None:
    rows = tables(TENSORS, head)
    assert [row[:3] for row in rows] == [[t.name, t.dtype.name, str(list(t.dims))] for t in tensors]
    assert all(len(row) == 4 and row[3] for row in rows)


def test_the_fixed_bounds_are_those_of_the_code() -> None:
    limits = RequestLimits(vocab_size=1, max_seq_len=1, max_input_len=1, kv_cache_tokens=1)
    assert (limits.max_words, limits.max_words_tokens) == (2 * tensor_values.MAX_WORDS, tensor_values.MAX_WORDS_TOKENS)
    bounds = [
        messages.MAX_MESSAGE_BYTES,
        limits.max_end_ids,
        tensor_values.MAX_WORDS,
        tensor_values.MAX_WORDS_BYTES,
        limits.max_words_tokens,
        sampling_config.MAX_BEAM_WIDTHS,
        kv_cache_retention.MAX_RANGES,
        kv_cache_retention.MAX_DURATION_MS,
        request_parameters.MAX_TIMEOUT_US // 1000,
        request_parameters.MAX_SALT_BYTES,
        f"{sampling_config.MAX_BIAS:g}",
        f"{sampling_config.MAX_PENALTY:g}",
        f"{sampling_config.MAX_REPETITION_PENALTY:g}",
        f"{sampling_config.MAX_DIVERSITY_RATE:g}",
        lora.MAX_NAME_LENGTH,
        adapter_library.MAX_NUMBERS,
        lora.MAX_ROWS,
        adapter_library.MAX_ADAPTERS,
        peft_folder.MAX_CONFIG_BYTES,
        prompt_adapters.MAX_BYTES,
        grammars.MAX_IDLE,
        guide_limits.MAX_EXPANDED,
        guide_limits.MAX_RULES,
        ngram_index.MAX_INDEXED,
        workers.MAX_WORKERS,
        tensor_values.MAX_BATCH_BYTES,
        processing.MAX_DECODED_TOKENS,
        messages.MAX_FRONT_ID,
    ]
    assert [value for _, value in tables(TENSORS, "bound")] == [str(bound) for bound in bounds]


def test_the_feature_table_is_what_the_tests_serve() -> None:
    assert with_table(text_of(FEATURES)) == text_of(FEATURES), "python -m ci.feature_table brings it up to date"


def test_the_tests_that_prove_features_of_an_engine_exist() -> None:
    proofs = [proof for feature in ENGINE_FEATURES for proof in feature.proofs.values()]
    proofs += [cell for cells in STATE_FEATURES.values() for cell in cells if "::" in cell]
    for proof in proofs:
        path, function = proof.split("::")
        assert f"\ndef {function}(" in (ROOT / path).read_text(encoding="utf-8"), proof


def test_the_dialects_tables_and_models_are_what_the_dialects_say() -> None:
    files = made_files()
    found = {path: path.read_text(encoding="utf-8") for path in APIS.rglob("*") if path.is_file()}
    assert found == files, "python -m ci.dialect_models brings them up to date"


def test_kernels_of_features_exist_and_are_compiled_for_gpus() -> None:
    """A family with a file of cases is compiled as a whole, see ci/kernels."""
    for kind in (*KINDS, *ENGINE_FEATURES):
        for name in kind.kernels:
            family = getattr(inflight_kernels, name).__module__.split(".")[1]
            assert (ROOT / "ci" / "kernels" / family / "aot_cases.py").is_file(), name


def test_every_native_architecture_is_in_the_table() -> None:
    named = set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", text_of(MODELS).partition("## Native")[2]))
    assert named == ARCHITECTURES.keys()
    assert f"[{len(ARCHITECTURES)} architectures](" in text_of(ROOT / "docs" / "FEATURES.md")


def test_every_metric_family_is_listed() -> None:
    listed = {name for row in tables(MONITORING, "family") for name in re.split("`?, `?", row[0])}
    assert listed == {family.name for family in FAMILIES}


def test_every_metric_of_vllm_is_named() -> None:
    families = [family.name for families in vllm_families(1000).values() for family in families]
    assert set(re.findall(r"`(vllm:\w+)`", text_of(MONITORING))) == set(families)


def test_every_error_code_is_listed() -> None:
    codes = {
        kind.code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.InflightError) and kind is not errors.ConfigurationError
    }
    assert {row[0] for row in tables(TENSORS, "code")} == codes


@cache
def tree() -> tuple[str, ...]:
    """Every path that the tree names; folders end with a slash."""
    found: list[str] = []
    parents: list[str] = []
    for line in section(ARCHITECTURE, "The tree").split("```")[1].strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split()
        found += ["".join(parents[:depth]) + name for name in names]
        parents[depth:] = [names[0]] if names[0].endswith("/") else []
    return tuple(found)


def test_the_tree_says_what_the_docstrings_say() -> None:
    assert with_descriptions(text_of(ARCHITECTURE)) == text_of(ARCHITECTURE), "run: python -m ci.tree --write"


def test_what_the_tree_names_exists() -> None:
    missing = [path for path in tree() if not any(ROOT.glob(path.rstrip("/")))]
    assert missing == []
    assert [path for path in tree() if path.endswith("/") and not all(e.is_dir() for e in ROOT.glob(path[:-1]))] == []


def test_the_tree_names_every_folder_that_matters() -> None:
    """Those at the top, the engine's rooms, the parts of the other packages and of ci."""
    named = {folder.relative_to(ROOT) for path in tree() for folder in ROOT.glob(path.rstrip("/"))}
    parents = [ROOT, *(ROOT / name for name in ("backend/inflight", "kernels/inflight_kernels", "client", "ci"))]
    folders = {folder.relative_to(ROOT) for parent in parents for folder in code_folders(parent)}
    assert folders - named == set()


def code_folders(parent: Path) -> Iterator[Path]:
    """Folders that are ours: neither hidden, nor ignored by git, nor without any file of ours."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()}
    for folder in sorted(parent.iterdir()):
        is_hidden = folder.name in ignored or folder.name.startswith(".")
        if folder.is_dir() and not is_hidden and any((*folder.rglob("*.py"), *folder.rglob("*.pbtxt"))):
            yield folder


def test_the_files_of_a_requests_way_exist() -> None:
    """A name without a folder stands in the folder of the one before it."""
    way = section(ARCHITECTURE, "A request's way").split("```")[1]
    missing, folder = [], Path()
    for name in re.findall(r"[\w/]+\.py", way):
        path = Path(name)
        folder = path.parent if "/" in name else folder
        if not any((root / folder / path.name).is_file() for root in (ROOT, ROOT / "backend" / "inflight")):
            missing.append(str(folder / path.name))
    assert missing == []


def test_every_thread_is_listed() -> None:
    """Those whose name stands where they are made."""
    listed = section(ARCHITECTURE, "Processes and threads")
    made = re.compile(r"Thread\([^)]*\bname=f?\"([\w-]+)|ThreadPoolExecutor\([^)]*\"([\w-]+)\"")
    files = (ROOT / "backend" / "inflight").rglob("*.py")
    names = {name for file in files for pair in made.findall(text_of(file)) for name in pair if name}
    assert len(names) > 10 and [name for name in sorted(names) if f"`{name}" not in listed] == []


def test_the_words_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    texts = "\n".join(map(text_of, PAGES))
    calls = re.findall(r"(?:`|^ {4})make ([^`#\n]+)", texts, re.MULTILINE)
    named = {word for call in calls for word in re.sub(r"\w+=(<[^>]*>|\"[^\"]*\"|\S+)", "", call).split()}
    words = named - {"…"}
    assert words
    assert words - targets == set()


def test_the_commands_that_pages_show_have_their_options_and_keys() -> None:
    group: Any = typer.main.get_command(cli.app)
    keys = {"--set": {field.name for field in fields(EngineConfig)}, "--openai-set": SETTABLE}
    call = re.compile(r"^ {4}(?:\w+=\S+ )?(?:\.venv/bin/)?inflight ([a-z][\w-]*)(.*)$", re.MULTILINE)
    shown = [found for page in PAGES for found in call.findall(text_of(page))]
    assert len(shown) > 20
    for name, line in shown:
        options = {option for parameter in group.commands[name].params for option in parameter.opts}
        words = re.split(r" -- | +# ", line)[0].split()
        assert [word for word in words if word.startswith("-") and word not in options] == [], f"inflight {name}{line}"
        for option, value in pairwise(words):
            assert option not in keys or value.partition("=")[0] in keys[option], f"inflight {name}{line}"


def headings(page: Path) -> list[str]:
    """The anchors of a page's headings, as code hosts name them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE), re.M)
    return [anchor(title) for title in titles]


LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Each link of a page within the repository: as it is written, its file, its heading or ""."""
    for link in LINK.findall(text_of(page)):
        name, _, heading = link.partition("#")
        if "://" not in link:
            yield link, (page.parent / name).resolve() if name else page, heading


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_lines_of_a_page_have_120_characters_at_most(page: Path) -> None:
    """Rows of tables, trees and programs apart."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert len(set(headings(page))) == len(headings(page)), "two headings with one anchor"
    broken = [
        link
        for link, target, heading in links(page)
        if not target.exists() or (heading and heading not in headings(target))
    ]
    assert broken == []


def test_every_page_answers_a_question_of_the_list_once() -> None:
    assert sorted(ROOT / page.path for page in all_pages()) == list(PAGES)


def test_readme_has_three_screens_and_leads_on() -> None:
    assert len(text_of(README).splitlines()) <= 150
    linked = {target for _, target, _ in links(README)}
    assert [page for page in PAGES if page.parent == LIST.parent and page not in linked] == []


def test_the_pages_that_code_names_exist() -> None:
    """Comments, docstrings and messages name a page by its path from the top, or from their own folder."""
    missing = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in {".py", ".pbtxt", ".yml", ".h", ".cpp"}:
            for name in re.findall(r"[\w.-]+/[\w./-]*\.md\b", text_of(path)):
                if not any((start / name).is_file() for start in (ROOT, path.parent)):
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_programs_of_a_page_parse_and_their_imports_exist(page: Path) -> None:
    for program in re.findall(r"^```python\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and node.module in ("inflight", "inflight_client"):
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_readmes_picture_is_what_the_recorded_run_printed() -> None:
    assert survival.picture(text_of(survival.CAST)) == text_of(survival.PICTURE), "run: python -m ci.pictures.survival"
    assert survival.KILL in text_of(survival.CAST) and "bytes of both answers are equal" in text_of(survival.CAST)


def test_the_drawings_are_made_from_their_tables() -> None:
    drawn = {name: draw() for name, draw in diagrams.DRAWINGS.items()}
    found = {name: text_of(diagrams.FOLDER / name) for name in drawn}
    assert found == drawn, "run: python -m ci.pictures.diagrams"
    code = "\n".join(text_of(file) for file in (ROOT / "backend" / "inflight").rglob("*.py"))
    names = {name for _, owned in diagrams.PROCESSES for _, name, _ in owned if name[0].isupper()}
    assert [name for name in sorted(names) if not re.search(rf"^class {name}\b", code, re.MULTILINE)] == []


def test_every_picture_is_small_and_shown_with_words() -> None:
    shown = {}
    for page in PAGES:
        for words, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text_of(page)):
            shown[(page.parent / link).resolve()] = words
    pictures = [path for path in diagrams.FOLDER.iterdir() if path.suffix in {".png", ".svg"}]
    assert [path.name for path in pictures if len(shown.get(path, "").split()) < 8] == []
    assert [path.name for path in pictures if path.stat().st_size >= 200_000] == []


def test_pictures_of_a_server_say_what_they_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_work, "find_chromium", lambda: None)
    with pytest.raises(SystemExit, match=r"there is no Chromium: .* INFLIGHT_CHROMIUM"):
        at_work.main()
