#![allow(clippy::unwrap_used, reason = "a test: its panic is the report")]

use ringfence_frame::Batch;
use ringfence_offload::OffloadMeta;

use super::*;
use crate::emit::{ETHERNET_LEN, Ends};

/// Returns hop limit, traffic class and fragmentation of a packet that `change` has changed.
fn read(v4: bool, len: usize, id: u16, change: impl FnOnce(&mut [u8])) -> (Marks, Fragmentation) {
    let addresses = if v4 { ["10.0.0.2", "192.0.2.1"] } else { ["fd00::2", "2001:db8::1"] };
    let [from, to] = addresses.map(|ip| ip.parse().unwrap());
    let ends = Ends { from_mac: [2; 6], to_mac: [4; 6], from, to };
    let mut frame = vec![0; ends.header_len() + len];
    ends.write(&mut frame, 253, len, id).unwrap();
    change(&mut frame[ETHERNET_LEN..]);
    if v4 {
        assert_eq!(internet_checksum(&frame[ETHERNET_LEN..ETHERNET_LEN + 20]), 0);
    }
    let mut batch = Batch::with_capacity(1, frame.len());
    let offset = batch.reserve(frame.len()).unwrap();
    batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
    let index = batch.push_contiguous(offset, frame.len(), OffloadMeta::PLAIN).unwrap();
    let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
    let packet = Packet::read(batch.get(index).unwrap(), layers).unwrap();
    (packet.marks(), packet.fragmentation())
}

#[test]
fn marks_are_read_as_written() {
    for v4 in [true, false] {
        let write = |ip: &mut [u8]| set_marks(ip, 33, 0xb9).unwrap();
        let (marks, _) = read(v4, 30, 7, write);
        assert_eq!((marks.hops, marks.class), (33, 0xb9));
        assert_eq!(read(v4, 30, 7, |_| ()).0, Marks::default());
    }
}

#[test]
fn fragmentation_follows_length_df_and_identification() {
    for (v4, header) in [(true, 20), (false, 40)] {
        assert_eq!(read(v4, SHORT - header, 0, |_| ()).1, Fragmentation::Short);
        assert_eq!(read(v4, SHORT - header + 1, 7, |_| ()).1, Fragmentation::Presumed);
        assert_eq!(read(v4, 2000, 7, mark_joined).1, Fragmentation::Allowed);
    }
    assert_eq!(read(true, 2000, 0, |_| ()).1, Fragmentation::Forbidden);
    assert_eq!(read(false, 2000, 0, |_| ()).1, Fragmentation::Presumed);
}
