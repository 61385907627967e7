# The scheduler: no torch, no model, no HTTP. Build from the repository's root:
#   docker build -f deploy/images/scheduler.Dockerfile -t triptych-scheduler .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
# Where pip finds packages, if not on its default index.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The final environment has no pip: the build's pip installs into it.
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/triptych
COPY deploy/locks/ deploy/locks/
RUN grep '^setuptools==' deploy/locks/dev.txt > /tmp/setuptools.txt \
 && /build/bin/python -m pip install --no-deps --require-hashes -r /tmp/setuptools.txt \
 && /build/bin/python -m pip --python /opt/triptych/bin/python install --no-deps --require-hashes -r deploy/locks/scheduler.txt \
    -r deploy/locks/otel.txt
# A checkout is built into a wheel; a folder that `triptych compose-files` wrote has one.
COPY . .
RUN wheel="$(ls ./*.whl 2>/dev/null || true)" \
 && /build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels "${wheel:-.}" \
 && /build/bin/python -m pip --python /opt/triptych/bin/python install --no-deps /build/wheels/*.whl

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/triptych /opt/triptych
# Mount a volume here and set TRIPTYCH_STATE_DIR to it, and `triptych plan` works in the container.
RUN install -d -o 10001 -g 10001 /state
ENV PATH=/opt/triptych/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051
# The registry serves from the start, inference only once a worker is ready.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
  CMD ["/opt/triptych/bin/triptych", "healthcheck", "127.0.0.1:50051", "triptych.v1.WorkerRegistry"]
ENTRYPOINT ["/opt/triptych/bin/triptych", "scheduler"]
CMD ["--host", "0.0.0.0"]
