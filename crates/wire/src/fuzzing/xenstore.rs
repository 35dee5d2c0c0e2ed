use crate::xenstore::{
    Decoded, HEADER_LEN, Header, MessageReader, PAYLOAD_MAX, Path, Reply, StoreRequest, WatchEvent,
    WatchPath, decode, emit_permissions, parse_permissions, parse_strings, parse_transaction_id,
};

/// Reads a stream of xenstore messages as a server and as a client. The first byte sets the size of
/// the pieces in which the stream arrives.
pub fn xenstore_message(data: &[u8]) {
    let Some((&cut, stream)) = data.split_first() else { return };
    let messages = decode_all(stream);
    check_pieces(stream, usize::from(cut) + 1, &messages);
    for (header, payload) in &messages {
        check_message(header, payload);
    }
    check_paths(stream);
}

/// Decodes all messages of the stream at once.
fn decode_all(stream: &[u8]) -> Vec<(Header, &[u8])> {
    let mut messages = Vec::new();
    let mut left = stream;
    while let Ok(Some(Decoded { header, payload, rest })) = decode(left) {
        assert_eq!(payload.len(), header.len as usize);
        assert!(header.len <= PAYLOAD_MAX);
        assert_eq!(HEADER_LEN + payload.len() + rest.len(), left.len());
        assert_eq!(header.emit(), left[..HEADER_LEN]);
        messages.push((header, payload));
        left = rest;
    }
    messages
}

/// Asserts that the stream in pieces of `size` bytes gives the same messages.
fn check_pieces(stream: &[u8], size: usize, messages: &[(Header, &[u8])]) {
    let mut reader = MessageReader::new();
    let mut expected = messages.iter();
    for piece in stream.chunks(size) {
        reader.spare()[..piece.len()].copy_from_slice(piece);
        reader.commit(piece.len());
        loop {
            match reader.next() {
                Ok(Some(message)) => assert_eq!(Some(&message), expected.next()),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(reader.next(), Err(error), "a broken stream stays broken");
                    assert_eq!(expected.next(), None);
                    return;
                }
            }
        }
        assert!(reader.pending() < HEADER_LEN + PAYLOAD_MAX as usize);
    }
    assert_eq!(expected.next(), None);
}

/// Asserts that every accepted message survives emitting and parsing again.
fn check_message(header: &Header, payload: &[u8]) {
    if let Ok(request) = StoreRequest::parse(header.kind, payload) {
        assert_eq!(request.kind(), header.kind);
        let mut bytes = Vec::new();
        let emitted = request.emit(header.req_id, header.tx_id, &mut bytes);
        emitted.expect("what came in one message goes out in one");
        let again = decode(&bytes).expect("well-formed").expect("whole");
        assert_eq!(again.rest, b"");
        assert_eq!((again.header.req_id, again.header.tx_id), (header.req_id, header.tx_id));
        assert_eq!(StoreRequest::parse(again.header.kind, again.payload), Ok(request));
    }
    if let Ok(list) = parse_permissions(payload) {
        let mut bytes = Vec::new();
        emit_permissions(&list, &mut bytes);
        assert_eq!(parse_permissions(&bytes), Ok(list));
    }
    if let Ok(strings) = parse_strings(payload) {
        let bytes: Vec<u8> = strings.flat_map(|text| [text, b"\0"].concat()).collect();
        assert_eq!(bytes, payload);
    }
    let _ = Reply::parse(header.kind, header, payload).expect("the type is the one expected");
    let _ = WatchEvent::parse(payload);
    let _ = parse_transaction_id(payload);
}

/// Asserts that every accepted path keeps all rules.
fn check_paths(text: &[u8]) {
    let _ = WatchPath::parse(text);
    let Ok(path) = Path::parse(text) else { return };
    assert_eq!(path.as_str().as_bytes(), text);
    assert!(!path.as_str().contains("//"));
    assert!(path.as_str() == "/" || !path.as_str().ends_with('/'));
    let depth = path.components().count();
    if let Some(parent) = path.parent() {
        assert_eq!(Path::parse(parent.as_str().as_bytes()), Ok(parent));
        assert_eq!(parent.components().count() + 1, depth);
        assert!(path.is_within(parent) && !parent.is_within(path));
    } else {
        assert!(depth <= 1);
    }
}
