"""AlterUserScramCredentials (51): create, change and delete SCRAM users."""

from __future__ import annotations

from semel.protocol.api import Api
from semel.protocol.schema import Struct, int8, int16, int32


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
