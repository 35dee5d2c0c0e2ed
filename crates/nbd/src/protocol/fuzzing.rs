//! Bodies of the protocol's fuzz targets, which also run as property tests.

use ringfence_sys::numbers::usize_from;

use super::agree::{ClientHandshake, ClientProgress};
use super::numbers::transmission;
use super::offer::{Agreed, Export, ServerHandshake, ServerProgress};
use super::replies::{Expect, Replies, ReplyContent};
use super::serve::parse_request;
use super::{Offer, PAYLOAD_MAX};

const OFFER: Offer = Offer {
    bytes: 1 << 20,
    flags: transmission::HAS_FLAGS,
    block_min: 512,
    block_preferred: 4096,
    payload_max: PAYLOAD_MAX,
};

/// Feeds both sides of the handshake. The first byte selects the options and the length of the pieces. A
/// request follows the handshake.
///
/// # Panics
///
/// Panics if a side consumes more than its input, or sends far more than it received.
pub fn handshakes(data: &[u8]) {
    let Some((&cut, mut data)) = data.split_first() else { return };
    let export = Export { name: "disk".to_owned(), description: String::new(), offer: OFFER };
    let mut server = ServerHandshake::new(export);
    let Ok(client) = ClientHandshake::new("disk", cut & 1 != 0) else { return };
    let mut client = if cut & 8 != 0 { client.simple() } else { client };
    let (mut sent, mut asked) = (vec![], vec![]);
    let received = data.len();
    let (mut serving, mut asking) = (true, true);
    for _ in 0..2000 {
        let piece = &data[..data.len().min(1 + usize::from(cut))];
        let mut used_by_any = 0;
        if serving {
            match server.feed(piece, &mut sent) {
                Ok((used, progress)) => {
                    used_by_any = used;
                    serving = progress == ServerProgress::More;
                }
                Err(_) => serving = false,
            }
            assert!(used_by_any <= piece.len());
        }
        if asking {
            match client.feed(piece, &mut asked) {
                Ok((used, progress)) => {
                    assert!(used <= piece.len());
                    used_by_any = used_by_any.max(used);
                    asking = progress == ClientProgress::More;
                }
                Err(_) => asking = false,
            }
        }
        let step = used_by_any.max(1).min(data.len());
        data = &data[step..];
        if data.is_empty() {
            break;
        }
    }
    assert!(sent.len() <= 256 + received * 16 && asked.len() <= 4096);
    if let Some((bytes, _)) = data.split_first_chunk() {
        let agreed = Agreed { structured: cut & 2 != 0, block_status: cut & 4 != 0 };
        if let Ok(request) = parse_request(bytes, &OFFER, agreed)
            && request.command.is_ok()
            && request.len > 0
        {
            assert!(request.payload <= PAYLOAD_MAX);
        }
    }
}

/// Feeds replies to a client that sent a few requests.
///
/// # Panics
///
/// Panics if data is reported that was not requested, twice, or after the end of its request.
pub fn replies(data: &[u8]) {
    const ASKED: u32 = 4096;
    let Some((&cut, data)) = data.split_first() else { return };
    let mut replies = Replies::new(cut & 1 != 0);
    for cookie in 0..8 {
        let read = Expect::Data { offset: cookie * 8192, len: ASKED };
        let others = if cookie < 7 { Expect::Done } else { Expect::Extents(ASKED) };
        replies.expect(cookie, if cookie < 4 { read } else { others });
    }
    let mut moved = [0u64; 8];
    let mut over = [false; 8];
    let index = |cookie: u64| usize_from(cookie);
    for piece in data.chunks(1 + usize::from(cut >> 1)) {
        let fed = replies.feed(piece, |answer| {
            let (cookie, at, len) = match answer {
                ReplyContent::Data { cookie, at, bytes } => (cookie, at, bytes.len() as u64),
                ReplyContent::Zeros { cookie, at, len } => (cookie, at, len),
                ReplyContent::Extent { cookie, len, .. } => {
                    assert!(cookie == 7 && !over[7] && len > 0);
                    assert!(moved[7] < u64::from(ASKED));
                    moved[7] += u64::from(len);
                    return;
                }
                ReplyContent::Over { cookie, result } => {
                    assert!(!std::mem::replace(&mut over[index(cookie)], true));
                    let whole = moved[index(cookie)] == u64::from(ASKED);
                    let described = cookie != 7 || moved[7] > 0;
                    assert!(result.is_err() || whole || (cookie >= 4 && described));
                    return;
                }
            };
            assert!(cookie < 4 && at + len <= u64::from(ASKED) && !over[index(cookie)]);
            moved[index(cookie)] += len;
            assert!(moved[index(cookie)] <= u64::from(ASKED));
        });
        if fed.is_err() {
            return;
        }
    }
}
