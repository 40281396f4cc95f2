# A gateway for a cluster: opens, leases, proxies and reaps session pods. No browser, no torch, no root.
#
#   docker build -f deploy/gateway.Dockerfile -t palaestra-gateway:dev .
#
# Runs with a read-only root filesystem; /tmp must be writable.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/palaestra
WORKDIR /source
COPY constraints.txt deploy/gateway.txt ./
RUN /opt/palaestra/bin/pip install --no-cache-dir --constraint constraints.txt --requirement gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/palaestra/bin/pip install --no-cache-dir --no-deps . \
 && /opt/palaestra/bin/pip uninstall --yes --quiet pip setuptools

FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 tini \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/palaestra /opt/palaestra
ENV PATH=/opt/palaestra/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8700
ENTRYPOINT ["/usr/bin/tini", "--", "python", "-m", "palaestra.gateway"]
CMD ["--config", "/etc/palaestra/gateway.yaml"]
