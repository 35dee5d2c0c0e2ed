//! Segmentation of a TCP super-packet: `segment [BYTES [MSS]]`.
//!
//! The program builds a frame with BYTES of payload, which no wire could carry, and prints the packets that a receiver
//! without TSO gets: their sequence numbers, lengths and checksums. Payload is never moved.
//!
//! Run: `cargo run -p ringfence-offload --example segment -- 10000 1448`

use std::error::Error;

use ringfence_offload::Layers;
use ringfence_offload::frame_bytes::Pieces;
use ringfence_offload::segment::{HEADER_MAX, Segmenter};
use ringfence_offload::vnet::VnetHeader;

/// Bytes of the Ethernet, IPv4 and TCP headers.
const HEADERS: usize = 14 + 20 + 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let bytes: u16 = words.next().map_or(Ok(10_000), |word| word.parse())?;
    let mss: u16 = words.next().map_or(Ok(1448), |word| word.parse())?;
    let payload = vec![0x5a; usize::from(bytes)];
    let mut headers = headers(bytes).ok_or("an IPv4 packet has at most 65535 bytes")?;

    // The metadata of the frame, as a guest's kernel writes it before the frame: checksum blank, TCP over IPv4.
    let [low, high] = mss.to_le_bytes();
    let vnet = VnetHeader::from_modern(&[1, 1, 54, 0, low, high, 34, 0, 16, 0, 0, 0]);
    let layers = Layers::parse(&headers, u32::try_from(HEADERS + payload.len())?)?;
    let meta = vnet.accept(&mut headers, &Ok(layers))?;

    let mut segmenter = Segmenter::new(&headers, &layers, meta)?;
    let pieces: [&[u8]; 2] = [&headers, &payload];
    let mut frame = Pieces::new(&pieces);
    let mut header = [0; HEADER_MAX];
    while let Some(segment) = segmenter.next_complete(&mut header, &mut frame)? {
        let number = u32::from_be_bytes([header[38], header[39], header[40], header[41]]);
        let checksum = u16::from_be_bytes([header[50], header[51]]);
        let (headers, payload) = (segment.header_len, segment.payload);
        println!(
            "sequence {number:6}  checksum {checksum:#06x}  {headers} bytes of headers, then {payload:?}"
        );
    }
    Ok(())
}

/// Builds the headers of a TCP packet from 10.9.0.1 to 10.9.0.2 with `bytes` of payload. The checksums are blank: the
/// segmenter computes them.
fn headers(bytes: u16) -> Option<[u8; HEADERS]> {
    let [high, low] = bytes.checked_add(40)?.to_be_bytes();
    let mut headers = [0; HEADERS];
    headers[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    headers[14..22].copy_from_slice(&[0x45, 0, high, low, 0, 0, 0x40, 0]);
    headers[22..34].copy_from_slice(&[64, 6, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
    headers[34..38].copy_from_slice(&[0x13, 0x88, 0, 80]);
    // Data offset of 20 bytes, ACK, a window of 64 KiB.
    headers[46..50].copy_from_slice(&[0x50, 0x10, 0xff, 0xff]);
    Some(headers)
}
