from setuptools import find_packages as find, setup
setup(packages=find(include=["whale_nebula*"]) + [f"whale_nebula.{p}" for p in find(include=["models*", "strategies*"])])
