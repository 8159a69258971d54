"""Who may ask: names in Host, and the API key. No server and no model: the gate around an app that says yes."""

import asyncio
import hmac
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx", reason="the client: pip install 'taco-jax[test]'")
pytest.importorskip("starlette", reason="the extra serve: pip install 'taco-jax[serve]'")
pytest.importorskip("uvicorn", reason="the extra serve: pip install 'taco-jax[serve]'")

import httpx

from taco_jax.config import ConfigError
from taco_jax.inference import serve
from taco_jax.inference.serving import gate, process
from taco_jax.inference.serving.gate import LOOPBACK, Gate, host_name


async def _yes(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"yes"})


def ask(path: str = "/v1/models", headers: dict[str, str] | None = None, **of_gate) -> httpx.Response:
    async def asked():
        transport = httpx.ASGITransport(Gate(_yes, **of_gate))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(asked())


@pytest.mark.parametrize(
    "host, name",
    [
        ("localhost:8000", "localhost"), ("LocalHost", "localhost"), ("localhost.", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("::1", "::1"), ("a.b:", "a.b"), ("", ""),
    ],
)  # fmt: skip
def test_the_name_in_a_host_header(host, name):
    assert host_name(host) == name


@pytest.mark.parametrize("host", ["localhost", "localhost:99", "127.0.0.1:8000", "[::1]:8000", "proxy.example.com"])
def test_hosts_that_are_taken(host):
    assert ask(headers={"Host": host}, hosts=(*LOOPBACK, "Proxy.Example.com")).text == "yes"
    assert ask(headers={"Host": host}).text == ask(headers={"Host": host}, hosts=("*",)).text == "yes"


@pytest.mark.parametrize(
    "host", ["evil.example.com:8000", "localhost.evil.com", "127.0.0.1.nip.io", "evil.com:localhost", "xlocalhost", ""]
)
def test_a_page_that_points_its_own_name_at_this_machine_is_refused(host):
    response = ask(headers={"Host": host}, hosts=LOOPBACK)
    assert response.status_code == 403 and response.json()["error"]["code"] == "host_not_allowed"
    assert f"Host='{host}': is not served here; --allowed-host" in response.json()["error"]["message"]
    assert ask("/health", {"Host": host}, hosts=LOOPBACK).text == "yes"


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "an API key is needed: Authorization: Bearer KEY"),
        ("Bearer wrong", "the API key is wrong"), ("Bearer secre", "the API key is wrong"), ("secret", "is wrong"),
        ("Bearer", "is wrong"), ("Bearer secrets", "is wrong"), ("Basic secret", "is wrong"), ("Bearer é", "is wrong"),
    ],
)  # fmt: skip
def test_without_the_key_nothing_but_health_is_answered(value, message):
    headers = {} if value is None else {"Authorization": value.encode()}
    for path in ("/v1/models", "/v1/completions", "/", "/health/x", "//health"):
        response = ask(path, headers, key="secret")
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert message in error["message"] and "secret" not in error["message"]
    assert ask("/health", headers, key="secret").text == "yes"


@pytest.mark.parametrize(
    "host, more, taken",
    [
        ("127.0.0.1", (), {"127.0.0.1", "localhost", "[::1]"}),
        ("127.0.0.1", ("proxy.com",), {"127.0.0.1", "localhost", "[::1]", "proxy.com"}),
        ("localhost", (), {"127.0.0.1", "localhost", "[::1]"}),
        ("0.0.0.0", (), {"127.0.0.1", "localhost", "[::1]", "proxy.com", "0.0.0.0", "evil.com"}),
        ("0.0.0.0", ("proxy.com",), {"127.0.0.1", "localhost", "[::1]", "proxy.com", "0.0.0.0"}),
    ],
)
def test_names_by_the_address_that_is_listened_on(host, more, taken):
    """Those of this machine and --host always are."""
    with process.bind(host, 0) as bound:
        hosts = serve._hosts(serve.ServeConfig(host=host, allowed_host=more), bound)
    asked = ("127.0.0.1", "localhost", "[::1]", "proxy.com", "0.0.0.0", "evil.com")
    assert {name for name in asked if ask(headers={"Host": f"{name}:80"}, hosts=hosts).text == "yes"} == taken


@pytest.mark.parametrize(
    "address, own",
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False),
        ("::", False), ("10.0.0.1", False), ("fe80::1%eth0", False), ("::ffff:10.0.0.1", False),
    ],
)  # fmt: skip
def test_which_addresses_only_this_machine_reaches(address, own):
    assert process.is_loopback(SimpleNamespace(getsockname=lambda: (address, 80))) is own


def test_a_body_is_read_before_the_answer_and_not_for_ever(monkeypatch):
    def refused(parts: list[dict]) -> int:
        """How many parts of a body are read before the request is refused."""
        sent, left = [], list(parts)

        async def receive():
            return left.pop(0)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        asyncio.run(Gate(_yes, key="secret")(scope, receive, send))
        assert sent[0]["status"] == 401
        return len(parts) - len(left)

    part = {"type": "http.request", "body": b"a" * 10, "more_body": True}
    assert refused([part, part, part | {"more_body": False}, part]) == 3
    assert refused([part, {"type": "http.disconnect"}, part]) == 2
    monkeypatch.setattr(gate, "MOST_DISCARDED", 30)
    assert refused([part] * 9) == 4


def test_the_key_is_compared_in_constant_time(monkeypatch):
    compared, real = [], hmac.compare_digest
    monkeypatch.setattr(gate.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    for value in ("Bearer secret", "bearer  secret "):
        assert ask(headers={"Authorization": value}, key="secret").text == "yes"
    assert ask(headers={"Authorization": "Bearer x"}, key="secret").status_code == 401
    assert compared == [(32, 32)] * 3  # of digests: not even the length can be measured


def test_keys_and_hosts_of_the_command(tmp_path):
    path = tmp_path / "key"
    path.write_text("  secret\n")
    config = lambda **fields: serve.ServeConfig(model="x", **fields)
    assert serve._key(config()) is None and serve._key(config(api_key="a")) == "a"
    assert serve._key(config(api_key_file=str(path))) == "secret"
    path.write_text("two words")
    refused = [
        (lambda c: serve._key(c), {"api_key": ""}, "api_key: the key must be one word"),
        (lambda c: serve._key(c), {"api_key": "é"}, "api_key: the key must be one word"),
        (lambda c: serve._key(c), {"api_key_file": str(path)}, f"api_key_file='{path}': the key must be one word"),
        (lambda c: serve._key(c), {"api_key_file": str(tmp_path / "no")}, "cannot be read (No such file or directory)"),
        (lambda c: serve._key(c), {"api_key_file": "~no such user/key"}, "cannot be read (Could not determine home"),
        (lambda c: serve._key(c), {"api_key": "a", "api_key_file": "b"}, "both name a key; give one of them"),
        (serve._check, {"allowed_host": ("example.com:80",)}, "allowed_host='example.com:80': must be a name"),
        (serve._check, {"allowed_host": ("http://a",)}, "allowed_host='http://a': must be a name"),
        (serve._check, {"allowed_host": ("",)}, "allowed_host='': must be a name"),
    ]
    for check, fields, message in refused:
        with pytest.raises(ConfigError) as caught:
            check(config(**fields))
        assert message in str(caught.value) and "two words" not in str(caught.value)
    serve._check(config(allowed_host=("example.com", "*", "10.0.0.1", "::1", "[fe80::1]", "my_host")))
    with pytest.raises(ConfigError, match="--allowed-host: given 2 times; give it once, with all names"):
        serve.main(["--model", "x", "--allowed-host", "a", "--allowed_host=b"])
