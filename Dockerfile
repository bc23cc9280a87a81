# A node of a run. The stage `node` prepares the system; the stage `train` adds the project's packages.
#   docker build --tag elastic-train .
# --build-arg BASE=...: another base image, for example where no registry can be reached. It must be
# Debian-like; the stage `train` needs Python 3.11 or newer with pip in it.
ARG BASE=python:3.11-slim

FROM ${BASE} AS node
# Nothing here needs root, and a worker with root's rights could harm the other processes.
RUN useradd --create-home --uid 1000 trainer && install --directory --owner=trainer /runs
WORKDIR /home/trainer
USER trainer

FROM node AS train
USER root
# Options for pip, for example the index of a smaller build of torch.
ARG PIP_OPTIONS=""
# Further packages, for example fsspec's driver for the run's object store.
ARG PACKAGES=""
COPY pyproject.toml README.md LICENSE /source/
COPY elastic /source/elastic
RUN python3 -m pip install --no-cache-dir ${PIP_OPTIONS} /source ${PACKAGES}
COPY recipes recipes
USER trainer
ENV PYTHONUNBUFFERED=1
CMD ["elastic-train", "--help"]
