"""SASL, ACLs, SCRAM credentials and delegation tokens."""

from __future__ import annotations

from typing import Annotated

from semel.protocol.api import Api
from semel.protocol.schema import Struct, ignorable, int8, int16, int32, int64, versions


# SaslHandshake (17): choose the SASL mechanism.
class SaslHandshakeRequest(Struct):
    mechanism: str = ""


class SaslHandshakeResponse(Struct):
    error_code: int16 = 0
    mechanisms: list[str] = []


SASL_HANDSHAKE = Api(17, SaslHandshakeRequest, SaslHandshakeResponse, "0-1")


# SaslAuthenticate (36): one step of the SASL exchange.
class SaslAuthenticateRequest(Struct):
    auth_bytes: bytes = b""


class SaslAuthenticateResponse(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    auth_bytes: bytes = b""
    session_lifetime_ms: Annotated[int64, versions("1+"), ignorable] = 0


SASL_AUTHENTICATE = Api(36, SaslAuthenticateRequest, SaslAuthenticateResponse, "0-2", flexible="2+")


# DescribeAcls (29): list access rules.
class AclFilter(Struct):
    resource_type_filter: int8 = 0
    resource_name_filter: str | None = ""
    pattern_type_filter: int8 = 3
    principal_filter: str | None = ""
    host_filter: str | None = ""
    operation: int8 = 0
    permission_type: int8 = 0


class DescribeAclsRequest(AclFilter):
    pass


class AclDescription(Struct):
    principal: str = ""
    host: str = ""
    operation: int8 = 0
    permission_type: int8 = 0


class DescribeAclsResource(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    pattern_type: int8 = 3
    acls: list[AclDescription] = []


class DescribeAclsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""
    resources: list[DescribeAclsResource] = []


DESCRIBE_ACLS = Api(29, DescribeAclsRequest, DescribeAclsResponse, "1-3", flexible="2+")


# CreateAcls (30): create access rules.
class AclCreation(Struct):
    resource_type: int8 = 0
    resource_name: str = ""
    resource_pattern_type: int8 = 3
    principal: str = ""
    host: str = ""
    operation: int8 = 0
    permission_type: int8 = 0


class CreateAclsRequest(Struct):
    creations: list[AclCreation] = []


class AclCreationResult(Struct):
    error_code: int16 = 0
    error_message: str | None = ""


class CreateAclsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[AclCreationResult] = []


CREATE_ACLS = Api(30, CreateAclsRequest, CreateAclsResponse, "1-3", flexible="2+")


# DeleteAcls (31): delete access rules.
class DeleteAclsRequest(Struct):
    filters: list[AclFilter] = []


class DeleteAclsMatchingAcl(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    resource_type: int8 = 0
    resource_name: str = ""
    pattern_type: int8 = 3
    principal: str = ""
    host: str = ""
    operation: int8 = 0
    permission_type: int8 = 0


class DeleteAclsFilterResult(Struct):
    error_code: int16 = 0
    error_message: str | None = ""
    matching_acls: list[DeleteAclsMatchingAcl] = []


class DeleteAclsResponse(Struct):
    throttle_time_ms: int32 = 0
    filter_results: list[DeleteAclsFilterResult] = []


DELETE_ACLS = Api(31, DeleteAclsRequest, DeleteAclsResponse, "1-3", flexible="2+")


# DescribeUserScramCredentials (50): list SCRAM users.
class UserName(Struct):
    name: str = ""


class DescribeUserScramCredentialsRequest(Struct):
    users: list[UserName] | None = []


class CredentialInfo(Struct):
    mechanism: int8 = 0
    iterations: int32 = 0


class DescribeUserScramCredentialsResult(Struct):
    user: str = ""
    error_code: int16 = 0
    error_message: str | None = ""
    credential_infos: list[CredentialInfo] = []


class DescribeUserScramCredentialsResponse(Struct):
    throttle_time_ms: int32 = 0
    error_code: int16 = 0
    error_message: str | None = ""
    results: list[DescribeUserScramCredentialsResult] = []


DESCRIBE_USER_SCRAM_CREDENTIALS = Api(
    50, DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse, "0", flexible="0+"
)


# AlterUserScramCredentials (51): create, change and delete SCRAM users.
class ScramCredentialDeletion(Struct):
    name: str = ""
    mechanism: int8 = 0


class ScramCredentialUpsertion(Struct):
    name: str = ""
    mechanism: int8 = 0
    iterations: int32 = 0
    salt: bytes = b""
    salted_password: bytes = b""


class AlterUserScramCredentialsRequest(Struct):
    deletions: list[ScramCredentialDeletion] = []
    upsertions: list[ScramCredentialUpsertion] = []


class AlterUserScramCredentialsResult(Struct):
    user: str = ""
    error_code: int16 = 0
    error_message: str | None = ""


class AlterUserScramCredentialsResponse(Struct):
    throttle_time_ms: int32 = 0
    results: list[AlterUserScramCredentialsResult] = []


ALTER_USER_SCRAM_CREDENTIALS = Api(
    51, AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse, "0", flexible="0+"
)


# CreateDelegationToken (38): a token to log in with.
class Principal(Struct):
    principal_type: str = ""
    principal_name: str = ""


class CreateDelegationTokenRequest(Struct):
    owner_principal_type: Annotated[str | None, versions("3+")] = ""
    owner_principal_name: Annotated[str | None, versions("3+")] = ""
    renewers: list[Principal] = []
    max_lifetime_ms: int64 = 0


class CreateDelegationTokenResponse(Struct):
    error_code: int16 = 0
    principal_type: str = ""
    principal_name: str = ""
    token_requester_principal_type: Annotated[str, versions("3+")] = ""
    token_requester_principal_name: Annotated[str, versions("3+")] = ""
    issue_timestamp_ms: int64 = 0
    expiry_timestamp_ms: int64 = 0
    max_timestamp_ms: int64 = 0
    token_id: str = ""
    hmac: bytes = b""
    throttle_time_ms: int32 = 0


CREATE_DELEGATION_TOKEN = Api(38, CreateDelegationTokenRequest, CreateDelegationTokenResponse, "1-3", flexible="2+")


# RenewDelegationToken (39): let a token live longer.
class RenewDelegationTokenRequest(Struct):
    hmac: bytes = b""
    renew_period_ms: int64 = 0


class RenewDelegationTokenResponse(Struct):
    error_code: int16 = 0
    expiry_timestamp_ms: int64 = 0
    throttle_time_ms: int32 = 0


RENEW_DELEGATION_TOKEN = Api(39, RenewDelegationTokenRequest, RenewDelegationTokenResponse, "1-2", flexible="2+")


# ExpireDelegationToken (40): end the life of a token.
class ExpireDelegationTokenRequest(Struct):
    hmac: bytes = b""
    expiry_time_period_ms: int64 = 0


class ExpireDelegationTokenResponse(Struct):
    error_code: int16 = 0
    expiry_timestamp_ms: int64 = 0
    throttle_time_ms: int32 = 0


EXPIRE_DELEGATION_TOKEN = Api(40, ExpireDelegationTokenRequest, ExpireDelegationTokenResponse, "1-2", flexible="2+")


# DescribeDelegationToken (41): list tokens.
class DescribeDelegationTokenRequest(Struct):
    owners: list[Principal] | None = []


class DescribedDelegationToken(Struct):
    principal_type: str = ""
    principal_name: str = ""
    token_requester_principal_type: Annotated[str, versions("3+")] = ""
    token_requester_principal_name: Annotated[str, versions("3+")] = ""
    issue_timestamp: int64 = 0
    expiry_timestamp: int64 = 0
    max_timestamp: int64 = 0
    token_id: str = ""
    hmac: bytes = b""
    renewers: list[Principal] = []


class DescribeDelegationTokenResponse(Struct):
    error_code: int16 = 0
    tokens: list[DescribedDelegationToken] = []
    throttle_time_ms: int32 = 0


DESCRIBE_DELEGATION_TOKEN = Api(
    41, DescribeDelegationTokenRequest, DescribeDelegationTokenResponse, "1-3", flexible="2+"
)
