"""Credentials, ACLs and delegation tokens."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections import Counter
from typing import Any

from semel.broker.broker import BrokerNode
from semel.broker.dispatch import Handler, RequestContext
from semel.broker.quotas import ANONYMOUS
from semel.broker.turns import Turns
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import security as messages
from semel.protocol.schema import Struct

# --- SASL (17, 36), ACLs (29-31), delegation tokens (38-41): as on a Kafka node without security ---
_FIRST_WITH_REQUESTER = 3
_NO_AUTHORIZER = "No Authorizer is configured"
_ALREADY_IN = "SaslAuthenticate request received after successful authentication"
_NO_TOKENS = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED


def _always(response: Struct) -> Handler:
    """A handler whose response does not depend on the request."""
    return lambda broker, context, request: response


sasl_handshake = _always(messages.SaslHandshakeResponse(ErrorCode.ILLEGAL_SASL_STATE))
sasl_authenticate = _always(messages.SaslAuthenticateResponse(ErrorCode.ILLEGAL_SASL_STATE, _ALREADY_IN))
describe_acls = _always(
    messages.DescribeAclsResponse(
        error_code=ErrorCode.SECURITY_DISABLED, error_message=f"{_NO_AUTHORIZER} on the broker"
    )
)
renew_delegation_token = _always(messages.RenewDelegationTokenResponse(_NO_TOKENS, -1))
expire_delegation_token = _always(messages.ExpireDelegationTokenResponse(_NO_TOKENS, -1))
describe_delegation_token = _always(messages.DescribeDelegationTokenResponse(_NO_TOKENS))


def create_acls(
    broker: BrokerNode, context: RequestContext, request: messages.CreateAclsRequest
) -> messages.CreateAclsResponse:
    return messages.CreateAclsResponse(
        results=[
            messages.AclCreationResult(ErrorCode.SECURITY_DISABLED, f"{_NO_AUTHORIZER}.") for _ in request.creations
        ]
    )


def delete_acls(
    broker: BrokerNode, context: RequestContext, request: messages.DeleteAclsRequest
) -> messages.DeleteAclsResponse:
    return messages.DeleteAclsResponse(
        filter_results=[
            messages.DeleteAclsFilterResult(ErrorCode.SECURITY_DISABLED, f"{_NO_AUTHORIZER}.") for _ in request.filters
        ]
    )


def create_delegation_token(
    broker: BrokerNode, context: RequestContext, request: messages.CreateDelegationTokenRequest
) -> messages.CreateDelegationTokenResponse:
    requester = ("User", ANONYMOUS) if context.version >= _FIRST_WITH_REQUESTER else ("", "")
    return messages.CreateDelegationTokenResponse(
        error_code=_NO_TOKENS,
        principal_type="User",
        principal_name=ANONYMOUS,
        token_requester_principal_type=requester[0],
        token_requester_principal_name=requester[1],
        issue_timestamp_ms=-1,
        expiry_timestamp_ms=-1,
        max_timestamp_ms=-1,
    )


# --- SCRAM users (50, 51). Kept as Kafka keeps them; nobody logs in with them, as there is no SASL listener ---
_KEY = "scram/"
_MECHANISMS = {1: "sha256", 2: "sha512"}
_AT_ONCE = 100  # changes for one fsync; others are served after that
_MIN_ITERATIONS, _MAX_ITERATIONS = 4096, 16384

Refusal = tuple[ErrorCode, str]
Change = messages.ScramCredentialDeletion | messages.ScramCredentialUpsertion


async def describe_user_scram_credentials(
    broker: BrokerNode, context: RequestContext, request: messages.DescribeUserScramCredentialsRequest
) -> messages.DescribeUserScramCredentialsResponse:
    counts = Counter(user.name for user in request.users or [])
    names = list(counts) or sorted(name for name, _ in broker.store.items(_KEY))
    results = await Turns().map(lambda name: _describe(broker, name, counts[name] > 1), names)
    return messages.DescribeUserScramCredentialsResponse(results=results)


def _describe(broker: BrokerNode, name: str, is_double: bool) -> messages.DescribeUserScramCredentialsResult:
    if is_double:
        message = f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
        return messages.DescribeUserScramCredentialsResult(name, ErrorCode.DUPLICATE_RESOURCE, message)
    credentials = broker.store.get(_KEY + name)
    if credentials is None:
        message = f"Attempt to describe a user credential that does not exist: {name}"
        return messages.DescribeUserScramCredentialsResult(name, ErrorCode.RESOURCE_NOT_FOUND, message)
    infos = [
        messages.CredentialInfo(int(mechanism), entry["iterations"]) for mechanism, entry in sorted(credentials.items())
    ]
    return messages.DescribeUserScramCredentialsResult(name, credential_infos=infos)


async def alter_user_scram_credentials(
    broker: BrokerNode, context: RequestContext, request: messages.AlterUserScramCredentialsRequest
) -> messages.AlterUserScramCredentialsResponse:
    """All changes of a user, or none."""
    changes: list[Change] = [*request.deletions, *request.upsertions]
    counts = Counter(change.name for change in changes)
    refused: dict[str, Refusal] = {}
    turns = Turns()
    for at in range(0, len(changes), _AT_ONCE):
        _alter(broker, changes[at : at + _AT_ONCE], counts, refused)
        await turns.next()
    names = dict.fromkeys(change.name for change in changes)
    results = [
        messages.AlterUserScramCredentialsResult(name, *refused.get(name, (ErrorCode.NONE, None))) for name in names
    ]
    return messages.AlterUserScramCredentialsResponse(results=results)


def _alter(broker: BrokerNode, changes: list[Change], counts: Counter[str], refused: dict[str, Refusal]) -> None:
    for change in changes:
        refusal = _refusal(broker, change, counts[change.name] > 1)
        if refusal is not None:
            refused.setdefault(change.name, refusal)
    accepted = [change for change in changes if change.name not in refused]
    try:
        _apply(broker, accepted)
    except OSError as error:
        message = f"the data folder cannot be written: {error}"
        refused |= {change.name: (ErrorCode.KAFKA_STORAGE_ERROR, message) for change in accepted}


def _refusal(broker: BrokerNode, change: Change, is_double: bool) -> Refusal | None:
    if is_double:
        message = "A user credential cannot be altered twice in the same request"
        return ErrorCode.DUPLICATE_RESOURCE, message
    if not change.name:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"
    if change.mechanism not in _MECHANISMS:
        return ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"
    if isinstance(change, messages.ScramCredentialDeletion):
        if str(change.mechanism) not in (broker.store.get(_KEY + change.name) or {}):
            message = "Attempt to delete a user credential that does not exist"
            return ErrorCode.RESOURCE_NOT_FOUND, message
    elif change.iterations < _MIN_ITERATIONS:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations"
    elif change.iterations > _MAX_ITERATIONS:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iterations"
    return None


def _apply(broker: BrokerNode, changes: list[Change]) -> None:
    for change in changes:
        credentials = dict(broker.store.get(_KEY + change.name) or {})
        if isinstance(change, messages.ScramCredentialDeletion):
            del credentials[str(change.mechanism)]
        else:
            credentials[str(change.mechanism)] = _verifier(change)
        broker.store.put(_KEY + change.name, credentials or None)
    broker.store.commit()


def _verifier(upsertion: messages.ScramCredentialUpsertion) -> dict[str, Any]:
    """What a server needs to check a proof (RFC 5802). The salted password itself is not kept."""
    algorithm = _MECHANISMS[upsertion.mechanism]
    client_key = hmac.digest(upsertion.salted_password, b"Client Key", algorithm)
    server_key = hmac.digest(upsertion.salted_password, b"Server Key", algorithm)
    return {
        "iterations": upsertion.iterations,
        "salt": b64encode(upsertion.salt).decode(),
        "stored_key": b64encode(hashlib.new(algorithm, client_key).digest()).decode(),
        "server_key": b64encode(server_key).decode(),
    }
