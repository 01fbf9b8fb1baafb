"""SASL (17, 36), ACLs (29-31): answered as a Kafka node without security does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.protocol.errors import ErrorCode
from semel.protocol.messages.create_acls import AclCreationResult, CreateAclsRequest, CreateAclsResponse
from semel.protocol.messages.delete_acls import DeleteAclsFilterResult, DeleteAclsRequest, DeleteAclsResponse
from semel.protocol.messages.describe_acls import DescribeAclsRequest, DescribeAclsResponse
from semel.protocol.messages.sasl_authenticate import SaslAuthenticateRequest, SaslAuthenticateResponse
from semel.protocol.messages.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse

if TYPE_CHECKING:
    from semel.broker.broker import Broker
    from semel.broker.context import RequestContext

_NO_AUTHORIZER = "No Authorizer is configured"


def sasl_handshake(broker: Broker, context: RequestContext, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE)


def sasl_authenticate(
    broker: Broker, context: RequestContext, request: SaslAuthenticateRequest
) -> SaslAuthenticateResponse:
    message = "SaslAuthenticate request received after successful authentication"
    return SaslAuthenticateResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message=message)


def describe_acls(broker: Broker, context: RequestContext, request: DescribeAclsRequest) -> DescribeAclsResponse:
    return DescribeAclsResponse(error_code=ErrorCode.SECURITY_DISABLED, error_message=f"{_NO_AUTHORIZER} on the broker")


def create_acls(broker: Broker, context: RequestContext, request: CreateAclsRequest) -> CreateAclsResponse:
    return CreateAclsResponse(
        results=[AclCreationResult(ErrorCode.SECURITY_DISABLED, f"{_NO_AUTHORIZER}.") for _ in request.creations]
    )


def delete_acls(broker: Broker, context: RequestContext, request: DeleteAclsRequest) -> DeleteAclsResponse:
    return DeleteAclsResponse(
        filter_results=[
            DeleteAclsFilterResult(ErrorCode.SECURITY_DISABLED, f"{_NO_AUTHORIZER}.") for _ in request.filters
        ]
    )
