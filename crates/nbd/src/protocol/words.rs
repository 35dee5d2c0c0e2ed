//! Words for numbers of the handshake, for messages to users.

use std::borrow::Cow;

use super::numbers::{option, reply};

/// Returns the name of an option (`proto.md`, "Option types").
pub(super) fn option(number: u32) -> Cow<'static, str> {
    let name = match number {
        option::EXPORT_NAME | option::GO => "the export",
        option::LIST => "the list of its exports",
        option::STARTTLS => "TLS",
        option::INFO => "information about the export",
        option::STRUCTURED_REPLY => "structured replies",
        option::LIST_META_CONTEXT | option::SET_META_CONTEXT => "block status",
        number => return format!("option {number}").into(),
    };
    name.into()
}

/// Returns the reason that an error of the server stands for (`proto.md`, "Option reply types").
pub(super) fn refusal(error: u32) -> Cow<'static, str> {
    let why = match error {
        reply::UNSUPPORTED => "it does not know this request",
        reply::POLICY => "its configuration forbids it",
        reply::INVALID => "it takes the request for malformed",
        reply::PLATFORM => "its platform cannot do it",
        reply::TLS_REQUIRED => "it requires TLS",
        reply::UNKNOWN => "it has no export of this name",
        reply::SHUTDOWN => "it is shutting down",
        reply::BLOCK_SIZE_REQUIRED => "it requires clients that keep to its block sizes",
        reply::TOO_BIG => "the request is too long for it",
        reply::EXTENDED_HEADERS_REQUIRED => "it requires extended headers, which are not supported",
        error => return format!("error {error:#x}").into(),
    };
    why.into()
}

#[cfg(test)]
mod tests {
    use super::super::ProtocolError;
    use super::*;

    #[test]
    fn refusal_of_server_is_told_in_words() {
        let text = |option, error, message: &str| {
            ProtocolError::Refused { option, error, message: message.to_owned() }.to_string()
        };
        assert_eq!(
            text(option::GO, reply::POLICY, "not for you\n"),
            "the server refuses the export: its configuration forbids it: not for you\\n"
        );
        for error in (1..=10).map(|number| reply::ERROR + number) {
            assert!(!text(option::GO, error, "").contains("error"), "{error:#x}");
        }
        let unknown = text(77, reply::ERROR + 77, "");
        assert_eq!(unknown, "the server refuses option 77: error 0x8000004d");
    }
}
