"""Puts the packages of the checkout below `triptych` in the wheel; all else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("deploy", "gateway", "protos", "scheduler_svc", "worker_svc")

setup(
    packages=[
        "triptych",
        *(
            f"triptych.{name}"
            for name in find_packages(include=[*FOLDERS, *(f"{name}.*" for name in FOLDERS)])
        ),
    ],
    package_dir={f"triptych.{name}": name for name in FOLDERS},
)
