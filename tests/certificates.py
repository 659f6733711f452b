"""Certificate authorities of a test's own."""

from __future__ import annotations

import datetime
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from distributed.security import Security

ROLES = ("client", "scheduler", "worker")


def authority(folder: pathlib.Path, name: str) -> dict[str, str]:
    """Make an authority and one certificate of it; return the files ``ca``, ``cert`` and ``key``."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)

    def certify(subject: str, key, issuer: str, issuer_key, authority: bool):
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .sign(issuer_key, hashes.SHA256())
        )

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    files = {
        "ca": certify(name, ca_key, name, ca_key, True).public_bytes(serialization.Encoding.PEM),
        "cert": certify(f"{name} node", key, name, ca_key, False).public_bytes(serialization.Encoding.PEM),
        "key": key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
    for kind, data in files.items():
        (folder / f"{kind}.pem").write_bytes(data)
    return {kind: str(folder / f"{kind}.pem") for kind in files}


def security(files: dict[str, str]) -> Security:
    """Return what Dask's clusters and clients take, with encryption required."""
    keys = {f"tls_{role}_{kind}": files[kind] for role in ROLES for kind in ("cert", "key")}
    return Security(require_encryption=True, tls_ca_file=files["ca"], **keys)


def environment(files: dict[str, str]) -> dict[str, str]:
    """Return the same as configuration in environment variables."""
    comm = "DASK_DISTRIBUTED__COMM__"
    keys = {f"{comm}TLS__{role.upper()}__{kind.upper()}": files[kind] for role in ROLES for kind in ("cert", "key")}
    return {f"{comm}REQUIRE_ENCRYPTION": "True", f"{comm}TLS__CA_FILE": files["ca"], **keys}
