"""Content credentials: PNGs of samples are signed, and altered ones do not validate."""

from __future__ import annotations

import datetime
import io
import json
from pathlib import Path
from typing import Any

import c2pa
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from mutation import kills
from PIL import Image
from tiny import Train

from fedgen import cli


def certificate(name: str, issuer: str, key: Any, issuer_key: Any, use: Any, days: int = 30) -> str:
    """Return a certificate as PEM; ``use``: extended key usage; None for an authority."""
    now, is_authority = datetime.datetime.now(datetime.UTC), use is None
    names = [
        x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, text),
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Hospital"),
            ]
        )
        for text in (name, issuer)
    ]
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    usage |= {"digital_signature": not is_authority, "key_cert_sign": is_authority}
    builder = (
        x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_authority, None), True)
        .add_extension(x509.KeyUsage(**usage, crl_sign=is_authority), True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False
        )
    )
    if use is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), False)
    signed = builder.sign(issuer_key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def pem(key: Any, password: bytes | None = None) -> bytes:
    encryption: Any = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    form = serialization.PrivateFormat.TraditionalOpenSSL  # of older tools
    if isinstance(key, ed25519.Ed25519PrivateKey) or password:
        form = serialization.PrivateFormat.PKCS8
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """Return the settings of a signed sample."""
    write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    paths = {"credentials": "chain.pem", "credentials_key": "key.pem"}
    return [f"{name}={tmp_path / file}" for name, file in paths.items()]


def write_keys(
    place: Path, key: Any, use: Any = ExtendedKeyUsageOID.EMAIL_PROTECTION, days: int = 30
) -> None:
    authority = ec.generate_private_key(ec.SECP256R1())
    chain = certificate("site", "authority", key, authority, use, days)
    chain += certificate("authority", "authority", authority, authority, None)
    (place / "chain.pem").write_text(chain)
    (place / "key.pem").write_bytes(pem(key))


def credentials(image: Path) -> dict[str, Any]:
    with image.open("rb") as file, c2pa.Reader("image/png", file) as reader:
        content: dict[str, Any] = json.loads(reader.json())
    return content


def statuses(content: dict[str, Any]) -> list[str]:
    return [status["code"] for status in content.get("validation_status", [])]


@kills("fedgen/reporting/content_credentials.py", "assertions.append(", "list().append(")
def test_samples_carry_signed_credentials(
    train: Train, tmp_path: Path, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("method=dp_merf_small", "rounds=4")
    grid, folder = tmp_path / "grid.png", tmp_path / "folder"
    for out in (grid, folder):
        assert cli.run(["sample", f"run={run}", "n=4", f"out={out}", *keys]) == 0
    for image in (grid, *folder.rglob("*.png")):
        content = credentials(image)
        assert statuses(content) == ["signingCredential.untrusted"]  # the test's own authority
        [manifest] = content["manifests"].values()
        assert manifest["signature_info"]["common_name"] == "site"
        facts = {one["label"]: one["data"] for one in manifest["assertions"]}
        [action] = facts["c2pa.actions.v2"]["actions"]
        assert action["digitalSourceType"].endswith("/trainedAlgorithmicMedia")
        results = json.loads((run / "results.json").read_text())
        generator = facts["fedgen.generator"]
        assert generator["generator_sha256"] == results["generator_sha256"]
        assert generator["epsilon"] == results["epsilon"]["release"]
        assert manifest["title"] == "Samples of a differentially private generator"
    # the pixels are those of unsigned samples, and other pixels do not validate
    plain = tmp_path / "plain.png"
    assert cli.run(["sample", f"run={run}", "n=4", f"out={plain}"]) == 0
    assert np.array_equal(np.asarray(Image.open(plain)), np.asarray(Image.open(grid)))
    altered = bytearray(grid.read_bytes())
    altered[altered.rindex(b"IDAT") + 12] ^= 1
    with c2pa.Reader("image/png", io.BytesIO(bytes(altered))) as reader:
        assert "assertion.dataHash.mismatch" in statuses(json.loads(reader.json()))
    # data=folder reads signed images
    words = ["data=folder", f"data.path={folder}", "privacy.delta=0.001"]
    assert cli.run(["data", "check", *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("kind", ["P-384", "Ed25519", "RSA"])
def test_other_keys_sign(train: Train, tmp_path: Path, keys: list[str], kind: str) -> None:
    made: dict[str, Any] = {
        "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "Ed25519": ed25519.Ed25519PrivateKey.generate,
        "RSA": lambda: rsa.generate_private_key(65537, 2048),
    }
    write_keys(tmp_path, made[kind]())
    run, grid = train("method=dp_merf_small", "rounds=4"), tmp_path / "grid.png"
    assert cli.run(["sample", f"run={run}", "n=4", f"out={grid}", *keys]) == 0
    assert statuses(credentials(grid)) == ["signingCredential.untrusted"]


def test_mistakes_are_reported_in_one_line(
    train: Train, tmp_path: Path, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("method=dp_merf_small", "rounds=4")
    capsys.readouterr()

    def refused(problem: str, *words: str, out: str = "grid.png") -> None:
        place = tmp_path / out
        assert cli.run(["sample", f"run={run}", "n=4", f"out={place}", *words]) == 2
        said = capsys.readouterr().err
        assert problem in said and len(said.strip().splitlines()) == 1
        assert not place.exists()

    refused("credentials_key: is missing", keys[0])
    refused("credentials: is missing", keys[1])
    refused("applies to PNG files", *keys, out="a.npz")
    refused("nowhere cannot be read", f"credentials={tmp_path / 'nowhere'}", keys[1])
    other = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(pem(other))
    refused("is not the key of the first certificate", *keys)
    (tmp_path / "key.pem").write_bytes(pem(other, b"password"))
    refused("contains no unencrypted private key", *keys)
    (tmp_path / "key.pem").write_bytes(b"no key")
    refused("contains no unencrypted private key", *keys)
    write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()), ExtendedKeyUsageOID.SERVER_AUTH)
    refused("credentials: ", *keys)
    write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()), days=-1)
    refused("renew the certificate", *keys)
    (tmp_path / "chain.pem").write_text("no certificate")
    refused("contains no certificate", *keys)
    write_keys(tmp_path, dsa.generate_private_key(2048))
    refused("has a type that content credentials do not support", *keys)
