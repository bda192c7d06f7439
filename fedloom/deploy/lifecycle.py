"""Changes of a federation that exists: add and revoke organisations, renew certificates.

A server that runs applies them within seconds: it watches the files in its folder.
"""

import shutil
from datetime import datetime
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.deploy.certificates import (
    make_authority,
    make_server_certificate,
    new_key,
    read_certificate,
    read_public_key,
    read_tls_key,
    tls_key_bytes,
    write_certificate,
    write_key_pair,
)
from fedloom.deploy.door import REVOKED
from fedloom.deploy.events import SERVER, EventLog
from fedloom.deploy.init import check_organisation, write_organisation
from fedloom.deploy.secure import MEMBERS
from fedloom.deploy.terms import FederationTerms
from fedloom.experiment.files import write_whole


def add_organisation(server: Path, name: str, to: Path, key: Path | None = None) -> None:
    """Add an organisation; the others keep their numbers and keys. It takes part from the next run.

    Its folder gets the public keys of all organisations. For secure aggregation, the others need its `node.pub` as
    `members/NAME.pub`.

    Args:
        server: The server's folder.
        name: Name of the organisation. A revoked organisation can be added again, with a new key.
        to: Folder to create for the organisation.
        key: Its public key, if it has created its own; otherwise a key pair is created in `to`.

    Raises:
        UserError: If the name is taken or invalid, or a file cannot be used.
    """
    federation = FederationTerms.load(server)
    public, known = server / "organisations" / f"{name}.pub", name in federation.organisations
    check_organisation(name)
    if known and name not in federation.revoked and public.exists():
        raise UserError(
            f"'{name}' is already an organisation of '{federation.name}': choose another name; if it has lost its key, "
            f"restore its node.key, or revoke it first (fedloom deploy revoke {name}) and add it again with a new key"
        )
    if to.exists():
        raise UserError(f"'{to}' already exists: choose another folder with --to (keys are never overwritten)")
    given = None if key is None else key.read_bytes() if read_public_key(key) else None
    names = federation.organisations if known else (*federation.organisations, name)
    revoked = tuple(one for one in federation.revoked if one != name)
    changed = federation.model_copy(update={"organisations": names, "revoked": revoked})
    write_organisation(to, name, changed, server)
    if given is None:
        write_key_pair(to, "node", new_key())
        given = (to / "node.pub").read_bytes()
    else:
        (to / "node.pub").write_bytes(given)
    changed.save(server)  # before the key: an organisation that can connect has a number
    write_whole(public, given)
    shutil.copytree(public.parent, to / MEMBERS, ignore=shutil.ignore_patterns(f"*{REVOKED}"))
    EventLog(server / SERVER).add("added", name, number=changed.number(name))


def revoke_organisation(server: Path, name: str) -> None:
    """Revoke an organisation: it is disconnected and cannot connect again. The others keep their numbers.

    Args:
        server: The server's folder.
        name: Name of the organisation.

    Raises:
        UserError: If it is unknown, or the last organisation.
    """
    federation = FederationTerms.load(server)
    federation.number(name)
    if name in federation.revoked:
        raise UserError(f"'{name}' is revoked already")
    revoked = (*federation.revoked, name)
    if len(revoked) == len(federation.organisations):
        raise UserError(f"'{name}' is the last organisation of '{federation.name}': stop the server instead")
    public = server / "organisations" / f"{name}.pub"
    if public.exists():
        public.replace(public.with_name(public.name + REVOKED))
    federation.model_copy(update={"revoked": revoked}).save(server)
    EventLog(server / SERVER).add("revoked", name)


def renew_certificates(server: Path, authority_key: Path, *, authority: bool = False) -> datetime:
    """Create a new key and certificate for the server.

    Args:
        server: The server's folder.
        authority_key: The private key of the federation's CA, `ca.key`.
        authority: Renew the CA's certificate too, for ten years. Its key stays, so organisations with the old `ca.pem`
            can connect until that expires.

    Returns:
        The end of the server's new certificate.

    Raises:
        UserError: If a file cannot be used, or the key is not that of the CA.
    """
    federation, ca, key = FederationTerms.load(server), read_certificate(server / "ca.pem"), read_tls_key(authority_key)
    if ca.public_key() != key.public_key():
        raise UserError(f"--ca-key {authority_key}: is not the key of {server}/ca.pem; give the federation's ca.key")
    if authority:
        ca = make_authority(federation.name, key=key)[1]
        write_certificate(server / "ca.pem", ca)
    tls_key, certificate = make_server_certificate((key, ca), federation.host)
    write_whole(server / "server.key", tls_key_bytes(tls_key), private=True)
    write_certificate(server / "server.pem", certificate)
    end = certificate.not_valid_after_utc
    EventLog(server / SERVER).add("renewed", "server", until=f"{end:%Y-%m-%d}")
    return end
