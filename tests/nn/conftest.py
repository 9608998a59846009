from tests.nn.on_the_host import cuda, host  # noqa: F401 - fixtures
