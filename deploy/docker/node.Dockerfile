# A node of the Ray cluster: head, learner, rollout, and the job client. torch, vLLM, DeepSpeed, Ray.
#
#   docker build -f deploy/docker/node.Dockerfile -t unspiral-node:cpu .
#   docker build -f deploy/docker/node.Dockerfile --build-arg EXTRAS=gpu,redis,models -t unspiral-node:gpu .
#
# CUDA comes with the wheels of torch and vLLM; the host brings the driver. Index settings (PIP_INDEX_URL, ...) are arguments of the
# first stage alone: nothing of them is left in the image that is made.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
ARG EXTRAS=cpu,redis,models
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG UV_DEFAULT_INDEX
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 DS_BUILD_OPS=0
WORKDIR /app
COPY pyproject.toml overrides.txt LICENSE ./
COPY deploy/setup_venv.sh deploy/
# xgrammar names triton, 1 GB whose kernels a CPU cannot run: vLLM goes without.
# The code is not there yet, so that a change of it does not install the packages again; the .pth file finds it at /app.
RUN touch README.md \
 && VENV=/opt/venv EDITABLE='' EXTRAS="${EXTRAS}" PYTHON=python3 deploy/setup_venv.sh \
 && case ",${EXTRAS}," in *,cpu,*) /opt/venv/bin/python -m pip --quiet uninstall --yes triton ;; esac \
 && /opt/venv/bin/python -m pip --quiet uninstall --yes uv pip \
 && echo /app > /opt/venv/lib/python3.11/site-packages/unspiral_code.pth

FROM ${PYTHON_IMAGE}
# DeepSpeed compiles an extension at its first start, torch and triton compile kernels: they need g++ at run time.
# hadolint ignore=DL3008
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin unspiral \
 && install -d -o unspiral -g unspiral /cache /runs /index
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba HOME=/tmp UNSPIRAL_CACHE=/cache \
    OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 UNSPIRAL_ROLE=node
COPY --from=packages /opt/venv /opt/venv
WORKDIR /app
COPY retriever_service retriever_service
COPY services services
COPY trainer trainer
COPY unspiral_command unspiral_command
COPY examples examples
COPY deploy/ray deploy/ray
RUN python -m compileall -q /app
USER 10001
CMD ["unspiral", "doctor"]
