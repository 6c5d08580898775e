# inflight on NVIDIA's tritonserver image, which brings the server, its Python backend and CUDA.
# The base is an argument, so that a mirror or a newer release can take its place; its Python must be 3.10 to 3.13.
ARG BASE=nvcr.io/nvidia/tritonserver:24.10-py3

FROM ${BASE} AS torch
COPY constraints.txt /opt/inflight/constraints.txt
# An environment of its own: nothing that the base ships, numpy 2 above all, is then in the way of what is pinned.
RUN python3 -m pip install --no-cache-dir virtualenv==20.35.4 \
    && python3 -m virtualenv /opt/inflight/venv \
    && /opt/inflight/venv/bin/pip install --no-cache-dir --constraint /opt/inflight/constraints.txt torch

# The layers in C++ are compiled here, so that the image that serves needs no compiler for them.
FROM torch AS wheel
# Sets of instructions: all of this architecture, none (for others than x86-64 and aarch64), or names.
ARG VARIANTS=all
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY backend backend
COPY kernels kernels
COPY client client
COPY model_repository model_repository
RUN PYTHONPATH=kernels /opt/inflight/venv/bin/python -m inflight_kernels.cpu.prebuilt /libraries "${VARIANTS}" \
    && INFLIGHT_LIBRARIES=/libraries python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM torch AS engine
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /opt/inflight/venv/bin/pip install --no-cache-dir --constraint /opt/inflight/constraints.txt /wheel/*.whl
RUN useradd --create-home --uid 1001 inflight && install --directory --owner=inflight /opt/inflight/kernels
USER 1001
WORKDIR /home/inflight
ENV PATH=/opt/inflight/venv/bin:${PATH} INFLIGHT_KERNELS=/opt/inflight/kernels

# Kernels of the default model for these GPUs, compiled without one, so that the first start does not wait for them.
FROM engine AS kernels
ARG GPUS=A100,L40S,H100,B200
WORKDIR /source
COPY ci/compile_kernels.py ci/
COPY ci/helpers/fake_cuda ci/helpers/fake_cuda
RUN TRITON_CACHE_DIR=${INFLIGHT_KERNELS} python3 -m ci.compile_kernels --gpu "${GPUS}"

FROM engine
# To the same path: triton notes full ones.
COPY --from=kernels /opt/inflight/kernels /opt/inflight/kernels

# In a container the network's border is the container's, so the server listens on every interface of its own.
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/v2/health/ready', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["inflight", "serve", "--host", "0.0.0.0", "--no-demo"]
