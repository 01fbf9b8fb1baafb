"""DescribeUserScramCredentials (50): list SCRAM users."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32


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
