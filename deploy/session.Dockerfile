# A session: one Chromium and the server that drives it. No torch, no shell prompt, no root.
#
#   docker build -f deploy/session.Dockerfile -t palaestra-session:dev .
#
# Runs with a read-only root filesystem; /tmp must be writable, the browser keeps its profile and its shared memory there.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/palaestra
WORKDIR /source
COPY constraints.txt deploy/session.txt ./
RUN /opt/palaestra/bin/pip install --no-cache-dir --constraint constraints.txt --requirement session.txt
# Only the pages of this package are needed, not its dependencies (gymnasium, selenium, numpy).
RUN /opt/palaestra/bin/pip install --no-cache-dir --constraint constraints.txt --no-deps miniwob
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/palaestra/bin/pip install --no-cache-dir --no-deps . \
 && /opt/palaestra/bin/pip uninstall --yes --quiet pip setuptools

FROM ${BASE}
# tini is process 1: it forwards TERM and reaps the orphans of Chromium.
RUN apt-get update \
 && apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core python3 tini \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/palaestra /opt/palaestra
ENV PATH=/opt/palaestra/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# By number, so that a cluster with runAsNonRoot can verify that it is not root.
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["/usr/bin/tini", "--", "python", "-m", "palaestra.sessions.server"]
CMD ["--host", "0.0.0.0", "--port", "8000"]
