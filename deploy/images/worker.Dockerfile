# A worker. Build from the repository's root; for a CPU:
#   docker build -f deploy/images/worker.Dockerfile -t triptych-worker .
# torch's CPU build is not on every index: set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a place that has it.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
# For devices other than CPUs: requirements that replace the lock's torch, installed with their dependencies.
ARG DEVICE_REQUIREMENTS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The environment keeps its pip: demo models are packages, which the worker fetches at its first start.
RUN python3 -m venv /opt/triptych
COPY deploy/locks/ deploy/locks/
RUN grep -v '^torch==' deploy/locks/worker-cpu.txt > /tmp/without-torch.txt \
 && grep '^torch==' deploy/locks/worker-cpu.txt > /tmp/torch.txt \
 && sed 's/ --hash=.*//' /tmp/without-torch.txt > /tmp/versions.txt \
 && if [ -n "$DEVICE_REQUIREMENTS" ]; then \
      /opt/triptych/bin/python -m pip install -c /tmp/versions.txt $DEVICE_REQUIREMENTS; \
    else \
      /opt/triptych/bin/python -m pip install --no-deps --only-binary :all: --require-hashes -r /tmp/torch.txt \
      || { echo "no $(cut -d ' ' -f 1 /tmp/torch.txt) found: pass --build-arg PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, a place that has it" >&2; exit 1; }; \
    fi \
 && /opt/triptych/bin/python -m pip install --no-deps --require-hashes -r /tmp/without-torch.txt
# A folder that `triptych compose-files` wrote has a wheel; a checkout is built.
COPY . .
RUN wheel="$(ls ./*.whl 2>/dev/null || true)" \
 && /opt/triptych/bin/python -m pip install --no-deps --no-build-isolation "${wheel:-.}"
# Our kernels for x86 processors. Without them a worker uses the kernels of vLLM's wheel.
RUN if [ "$(uname -m)" = x86_64 ] && [ -z "$DEVICE_REQUIREMENTS" ]; then \
      apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
      && cd /tmp && /opt/triptych/bin/triptych build-kernels; \
    fi

FROM ${PYTHON_IMAGE}
# vLLM's CPU kernels look up which memory belongs to which processor.
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/triptych /opt/triptych
# A worker writes only to these folders and to /tmp. Mount a volume at the cache, which workers may share, and one for
# each worker at the folder of compiled code.
RUN install -d -o 10001 -g 10001 /cache /compiled
ENV PATH=/opt/triptych/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 50061
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["/opt/triptych/bin/triptych", "healthcheck", "127.0.0.1:50061"]
# Restarts a dead worker from a process that has imported everything (TRIPTYCH_STANDBY_WORKERS).
ENTRYPOINT ["/opt/triptych/bin/triptych", "keep-worker"]
CMD ["--host", "0.0.0.0"]
