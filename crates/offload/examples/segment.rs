//! Segmentation of a TCP super-packet into packets of the wire.
//!
//! The program builds a frame with 4000 bytes of TCP payload and a blank checksum, as a guest with TSO
//! sends it. It prints the segments for a receiver without offloads: headers completed, payload not moved.
//!
//! Run it with `cargo run -p ringfence-offload --example segment`.

use std::error::Error;

use ringfence_offload::octets::Pieces;
use ringfence_offload::segment::{HEADER_MAX, Segmenter};
use ringfence_offload::{Checksum, Gso, GsoKind, Layers, OffloadMeta};

/// Payload bytes of each segment except the last.
const MSS: u16 = 1448;
const PAYLOAD: usize = 4000;

/// Returns Ethernet, IPv4 and TCP headers without options, for `payload` bytes.
fn headers(payload: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut bytes = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x08, 0x00];
    let total = u16::try_from(20 + 20 + payload)?.to_be_bytes();
    bytes.extend([0x45, 0, total[0], total[1], 0, 1, 0x40, 0, 64, 6, 0, 0]);
    bytes.extend([10, 9, 0, 1, 10, 9, 0, 2]);
    bytes.extend([0x13, 0x88, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x18, 0xFF, 0xFF, 0, 0, 0, 0]);
    Ok(bytes)
}

fn main() -> Result<(), Box<dyn Error>> {
    let headers = headers(PAYLOAD)?;
    let payload = vec![7; PAYLOAD];
    let layers = Layers::parse(&headers, u32::try_from(headers.len() + payload.len())?)?;
    let meta = OffloadMeta {
        checksum: Checksum::Partial { start: 34, offset: 16 },
        gso: Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: MSS }),
    };
    let pieces = [&headers[..], &payload[..]];
    let mut segmenter = Segmenter::new(pieces[0], &layers, meta)?;
    let mut bytes = Pieces::new(&pieces);
    let mut header = [0; HEADER_MAX];
    let mut sum = 0;
    while let Some(segment) = segmenter.next_complete(&mut header, &mut bytes)? {
        println!("{} header bytes, payload {:?}", segment.header_len, segment.payload);
        sum += segment.payload.len();
    }
    assert_eq!(sum, PAYLOAD);
    Ok(())
}
