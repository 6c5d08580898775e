"""What ranks read of the job in which somebody else started them."""

from __future__ import annotations

import pytest

from inflight.distributed.outer_job import Membership, find_outer_job, join_outer_job
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, Membership(is_mpi=True, size=4, rank=1)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, Membership(is_mpi=True, size=3, rank=2)),
        ({"PMIX_RANK": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, Membership(is_mpi=True, size=2, rank=0)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Membership(is_mpi=False, size=2, rank=1)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}, Membership(False, 2, 1)),
    ],
)
def test_each_launcher_s_variables_are_understood(environment: dict[str, str], expected: Membership | None) -> None:
    assert find_outer_job(environment) == expected


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_a_rank_alone_needs_nobody(environment: dict[str, str]) -> None:
    assert isinstance(join_outer_job(environment), SingleRank)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            "rank 1 of 2 does not know where .* export MASTER_ADDR and",
        ),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a number, got 'one'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        join_outer_job(environment)
