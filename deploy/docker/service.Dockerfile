# A service without torch and Ray: the retriever (EXTRAS empty), or the likelihood service (ROLE=likelihood, EXTRAS=redis).
#
#   docker build -f deploy/docker/service.Dockerfile --build-arg ROLE=likelihood --build-arg EXTRAS=redis -t unspiral-likelihood .
#
# Index settings (PIP_INDEX_URL, ...) are arguments of the first stage alone: nothing of them is left in the image that is made.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
ARG EXTRAS=
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG UV_DEFAULT_INDEX
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY pyproject.toml overrides.txt LICENSE ./
COPY deploy/setup_venv.sh deploy/
# The code is not there yet, so that a change of it does not install the packages again; the .pth file finds it at /app.
RUN touch README.md \
 && VENV=/opt/venv EDITABLE='' EXTRAS="${EXTRAS}" PYTHON=python3 deploy/setup_venv.sh \
 && /opt/venv/bin/python -m pip --quiet uninstall --yes uv pip \
 && echo /app > /opt/venv/lib/python3.11/site-packages/unspiral_code.pth

FROM ${PYTHON_IMAGE}
ARG ROLE=retriever
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba HOME=/tmp UNSPIRAL_CACHE=/cache UNSPIRAL_ROLE=${ROLE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin unspiral \
 && install -d -o unspiral -g unspiral /index /cache /runs /store
COPY --from=packages /opt/venv /opt/venv
WORKDIR /app
COPY retriever_service retriever_service
COPY services services
COPY trainer trainer
COPY unspiral_command unspiral_command
COPY deploy/docker/build_index.py deploy/docker/build_index.py
RUN python -m compileall -q /app
USER 10001
ENTRYPOINT ["unspiral"]
CMD ["doctor"]
