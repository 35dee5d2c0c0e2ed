//! Fuzz target `proxy_answers`: arbitrary answers of a proxy, in pieces. A property test runs it, too.

use super::{
    Credentials, Dialogue, ProxyFault, ProxyKind, ProxySettings, Target, TargetHost, http,
};

/// Result of a dialogue: the number of its bytes, its messages, and `true` if the proxy has opened the connection.
pub type Outcome = Result<(usize, Vec<u8>, bool), ProxyFault>;

/// Reads an answer in pieces of these lengths.
///
/// # Panics
///
/// Panics if the dialogue consumes no byte, more than there are, or more than its limit.
pub fn read_in_pieces(
    kind: ProxyKind,
    credentials: Option<Credentials>,
    answer: &[u8],
    mut piece: impl FnMut() -> usize,
) -> Outcome {
    let settings =
        ProxySettings { kind, host: String::new(), port: 1, addresses: Vec::new(), credentials };
    let target = Target { host: TargetHost::Address([192, 0, 2, 9].into()), port: 80 };
    let (mut dialogue, mut sent) = Dialogue::start(&settings, &target);
    let mut at = 0;
    while let Some(rest) = answer.get(at..).filter(|rest| !rest.is_empty()) {
        let len = piece().clamp(1, rest.len());
        let step = dialogue.read(rest.get(..len).unwrap_or_default())?;
        assert!((1..=len).contains(&step.consumed), "{step:?}");
        at += step.consumed;
        assert!(at <= http::REPLY_MAX, "the answer has no end");
        sent.extend_from_slice(&step.send);
        if step.is_done {
            return Ok((at, sent, true));
        }
    }
    Ok((at, sent, false))
}

/// Runs one case: a byte that selects the kind of proxy and the length of pieces, and the answer. The answer in pieces must
/// read as the whole, and bytes behind its end must change nothing.
///
/// # Panics
///
/// Panics if they do not.
pub fn proxy_answers(data: &[u8]) {
    let Some((&first, answer)) = data.split_first() else { return };
    let kind = if first & 1 == 0 { ProxyKind::Http } else { ProxyKind::Socks5 };
    let credentials =
        || (first & 2 != 0).then(|| Credentials::parse("user:password").ok()).flatten();
    let read = |answer: &[u8], len: usize| read_in_pieces(kind, credentials(), answer, || len);
    let whole = read(answer, usize::MAX);
    assert_eq!(whole, read(answer, usize::from(first >> 2)), "in pieces");
    if let Ok((end, _, true)) = whole {
        assert_eq!(whole, read(answer.get(..end).unwrap_or_default(), usize::MAX), "at its end");
    }
}
