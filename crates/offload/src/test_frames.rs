//! Frames that a Linux kernel (6.18) sent through a TAP without offloads, and functions to alter them.
//!
//! The kernel computed their checksums, so they are the reference for ours.

/// TCP SYN with 20 bytes of options, 10.9.0.1 to 10.9.0.2 port 80.
pub(crate) const TCP_V4: &str = "02000000000202000000000108004500003c723640004006b4710a0900010a09000286100050ebb52f0000000000a002faf091fa0000020405b40402080afbd70a0f000000000103030a";
/// TCP SYN as [`TCP_V4`], over IPv6, fd00:9::1 to fd00:9::2.
pub(crate) const TCP_V6: &str = "02000000000202000000000186dd600114ca00280640fd000009000000000000000000000001fd000009000000000000000000000002bc1a0050734cefb600000000a002fd20e0a90000020405a00402080a769cda25000000000103030a";
/// UDP datagram over IPv4 with the payload "ringfence".
pub(crate) const UDP_V4: &str = "020000000002020000000001080045000025a5d24000401180e10a0900010a090002138800350011bd6072696e6766656e6365";
/// UDP datagram under 12 bytes of IPv4 options (record route).
pub(crate) const UDP_V4_OPTIONS: &str = "02000000000202000000000108004800002da6144000401164820a0900010a090002070b080a090001000000000013880035000d8b1e726f757465";
/// Last fragment of an IPv4 datagram, 52 bytes at offset 1256.
pub(crate) const FRAGMENT_V4_LAST: &str = "020000000002020000000001080045000048a622009d4011bfd10a0900010a09000200000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000";
/// Start of the datagram's first fragment, a frame of 1290 bytes.
pub(crate) const FRAGMENT_V4_FIRST: &str =
    "0200000000020200000000010800450004fca622200040119bba0a0900010a09000213880035051ccde40000";
/// UDP datagram over IPv6.
pub(crate) const UDP_V6: &str = "02000000000202000000000186dd60002aaa00121140fd000009000000000000000000000001fd000009000000000000000000000002138800350012d72672696e6766656e636536";
/// UDP datagram behind a hop-by-hop and a destination options header.
pub(crate) const UDP_V6_EXTENSIONS: &str = "02000000000202000000000186dd60002aaa001b0040fd000009000000000000000000000001fd0000090000000000000000000000023c00050200000100110001040000000013880035000b1995686f70";
/// Start of the first fragment of an IPv6 datagram, a frame of 1294 bytes.
pub(crate) const FRAGMENT_V6_FIRST: &str = "02000000000202000000000186dd6001949704d82c40fd000009000000000000000000000001fd00000900000000000000000000000211000001459cf97d13890035051ce7e1000000000000";
/// Last fragment of the IPv6 datagram, 76 bytes at offset 1232.
pub(crate) const FRAGMENT_V6_LAST: &str = "02000000000202000000000186dd6001949700542c40fd000009000000000000000000000001fd000009000000000000000000000002110004d0459cf97d00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000";
/// ICMP echo request over IPv4.
pub(crate) const ICMP: &str = "0200000000020200000000010800450000242e4440004001f8800a0900010a090002080078d8731600010001020304050607";
/// ICMPv6 echo request over IPv6.
pub(crate) const ICMPV6: &str = "02000000000202000000000186dd600dc3dd00103a40fd000009000000000000000000000001fd00000900000000000000000000000280000618737500010001020304050607";
/// ARP request for an IPv4 address.
pub(crate) const ARP: &str =
    "ffffffffffff020000000001080600010800060400010200000000010a0900010000000000000a09004d";

/// TCP super-packet from a TAP with all offloads, a frame of 2974 bytes: virtio-net header (12 bytes,
/// little endian), start of the frame, length.
pub(crate) const VNET_TSO: (&str, &str, usize) = (
    "01013600b405220010000000",
    "020000000002020000000001080045000b908a6d4000400690e60a0900010a090002e3080050a57308f4000003e95018faf01f970000",
    2974,
);
/// UDP super-packet (`UDP_SEGMENT` 1000), a frame of 5042 bytes, as [`VNET_TSO`].
pub(crate) const VNET_USO: (&str, &str, usize) = (
    "01052a00e803220006000000",
    "0200000000020200000000010800450013a4b27200004011a0c20a0900010a09000213880035139027b6",
    5042,
);
/// Packet as [`UDP_V4`] with another IPv4 identification, a blank checksum and nothing to segment.
pub(crate) const VNET_UDP: (&str, &str, usize) = (
    "010000000000220006000000",
    "020000000002020000000001080045000025b26540004011744e0a0900010a090002138800350011143772696e6766656e6365",
    51,
);

/// All whole packets above that have a transport checksum.
pub(crate) const CHECKSUMMED: [&str; 8] =
    [TCP_V4, TCP_V6, UDP_V4, UDP_V4_OPTIONS, UDP_V6, UDP_V6_EXTENSIONS, ICMP, ICMPV6];

/// Decodes the bytes of a frame.
pub(crate) fn frame(hex: &str) -> Vec<u8> {
    let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok()).unwrap();
    hex.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// Returns the frame with VLAN tags inserted, outermost first.
pub(crate) fn tagged(hex: &str, tags: &[(u16, u16)]) -> Vec<u8> {
    let mut bytes = frame(hex);
    let tags = tags.iter().flat_map(|(tpid, id)| [tpid.to_be_bytes(), id.to_be_bytes()].concat());
    bytes.splice(12..12, tags.collect::<Vec<_>>());
    bytes
}

/// Returns the frame as a super-packet: with `payload` bytes appended and corrected IP and UDP lengths.
/// The transport checksum is then wrong.
pub(crate) fn grown(hex: &str, payload: u16) -> Vec<u8> {
    let mut bytes = frame(hex);
    let is_v4 = bytes[12..14] == [0x08, 0x00];
    let length_at = if is_v4 { 16 } else { 18 };
    add_at(&mut bytes, length_at, payload);
    if hex == UDP_V4 {
        add_at(&mut bytes, 38, payload);
    }
    if hex == UDP_V6 {
        add_at(&mut bytes, 58, payload);
    }
    bytes.extend((0..payload).map(|i| u8::try_from(i % 251).unwrap()));
    bytes
}

fn add_at(bytes: &mut [u8], at: usize, more: u16) {
    let sum = u16::from_be_bytes([bytes[at], bytes[at + 1]]) + more;
    bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Returns the length of a frame as the parser takes it.
pub(crate) fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}
