# A node of a run. Two stages: `node` is what a node needs of a system, `train` adds the project's packages.
#   docker build --tag elastic-train .
# The base image is an argument, so that a machine without a registry builds on what it has: --build-arg BASE=...
# It needs a Debian-like system; for `train` with Python 3.11 or newer and pip.
ARG BASE=python:3.11-slim

FROM ${BASE} AS node
# Nothing here needs to be root, and a worker that is one could do more harm than its own.
RUN useradd --create-home --uid 1000 trainer && install --directory --owner=trainer /runs
WORKDIR /home/trainer
USER trainer

FROM node AS train
USER root
# Options for pip, such as the index of a smaller build of torch.
ARG PIP_OPTIONS=""
# What a run needs beside the project, such as the library of its object store.
ARG PACKAGES=""
COPY pyproject.toml README.md LICENSE /source/
COPY elastic /source/elastic
RUN python3 -m pip install --no-cache-dir ${PIP_OPTIONS} /source ${PACKAGES}
COPY recipes recipes
USER trainer
ENV PYTHONUNBUFFERED=1
CMD ["elastic-train", "--help"]
