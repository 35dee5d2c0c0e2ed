//! Super-packets of every kind for the integration tests.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(unreachable_pub, reason = "a module of test binaries")]
#![allow(missing_docs, reason = "a module of test binaries")]
#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use ringfence_offload::blank::reset_pseudo_header;
use ringfence_offload::packet::tcp_flags::{ACK, CWR, ECE, FIN, PSH, RST, SYN, URG};
use ringfence_offload::segment::{HEADER_MAX, Segmenter};
use ringfence_offload::{Gso, GsoKind, Layers, OffloadMeta};

/// Source address of the corpus frames, used by no other sender.
pub const SOURCE_MAC: [u8; 6] = [2, 0, 0, 0, 0x5e, 1];
const DESTINATION_MAC: [u8; 6] = [2, 0, 0, 0, 0x5e, 2];

/// Identification of the IPv6 fragments.
pub const FRAGMENT_ID: u32 = 0x5eed_f00d;

/// VLAN tags of a frame, outermost first.
pub const TAGS: [&[(u16, u16)]; 4] =
    [&[], &[(0x8100, 7)], &[(0x88a8, 0x2064), (0x8100, 9)], &[(0x8100, 11), (0x8100, 0x6fff)]];

/// IPv4 options: none, end of list, router alert, record route, the longest possible.
pub const OPTIONS_V4: [&[u8]; 5] = [
    &[],
    &[1, 1, 1, 0],
    &[148, 4, 0, 0],
    &[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[
        7, 39, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
        23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 0,
    ],
];

/// IPv6 extension headers: their numbers, and lengths in bytes.
pub const EXTENSIONS_V6: [&[(u8, usize)]; 5] =
    [&[], &[(0, 8)], &[(60, 24)], &[(43, 24)], &[(0, 16), (60, 8), (43, 24), (60, 8)]];

/// TCP options: none, a timestamp, a timestamp with selective acknowledgements (the longest possible).
pub const OPTIONS_TCP: [&[u8]; 3] = [
    &[],
    &[1, 1, 8, 10, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0],
    &[
        1, 1, 8, 10, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 1, 5, 26, 0, 0, 0, 1, 0, 0,
        0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 6,
    ],
];

/// TCP flags: each alone, common combinations, all.
pub const FLAGS: [u8; 12] = [
    ACK,
    ACK | PSH,
    ACK | FIN,
    ACK | FIN | PSH,
    ACK | CWR,
    ACK | ECE,
    ACK | CWR | ECE | PSH,
    ACK | CWR | FIN,
    ACK | URG | PSH,
    SYN,
    RST | ACK,
    0xff,
];

/// Transport of a super-packet, and its segmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tcp,
    Uso,
    Ufo,
}

/// Parameters of one super-packet of the corpus.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub kind: Kind,
    pub is_v6: bool,
    /// Index into `TAGS`; the next two are indices into the option tables.
    pub tags: usize,
    pub ip_options: usize,
    pub tcp_options: usize,
    pub flags: u8,
    /// Segment size in bytes.
    pub size: u16,
    pub payload: usize,
    /// Seed of values without a rule: ports, sequence, identification, content.
    pub seed: u64,
}

/// Deterministic sequence of numbers (SplitMix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.chunks_mut(8).for_each(|c| c.copy_from_slice(&self.next().to_le_bytes()[..c.len()]));
        bytes
    }
}

impl Recipe {
    /// Returns the bytes in front of the payload.
    pub fn header_len(&self) -> usize {
        self.transport_at() + if self.kind == Kind::Tcp { 20 + self.tcp_options().len() } else { 8 }
    }

    fn tcp_options(&self) -> &'static [u8] {
        OPTIONS_TCP[self.tcp_options]
    }

    fn network_at(&self) -> usize {
        14 + 4 * TAGS[self.tags].len()
    }

    fn transport_at(&self) -> usize {
        let ip = if self.is_v6 {
            40 + EXTENSIONS_V6[self.ip_options].iter().map(|&(_, len)| len).sum::<usize>()
        } else {
            20 + OPTIONS_V4[self.ip_options].len()
        };
        self.network_at() + ip
    }

    /// Returns the largest payload that fits IP's 16-bit length.
    pub fn payload_max(&self) -> usize {
        let ip = if self.is_v6 { self.network_at() + 40 } else { self.network_at() };
        65535 - (self.header_len() - ip)
    }

    /// Builds the frame and its metadata with a blank checksum.
    pub fn build(&self) -> (Vec<u8>, OffloadMeta) {
        let mut numbers = Numbers(self.seed);
        let mut frame = [DESTINATION_MAC, SOURCE_MAC].concat();
        for (tpid, tag) in TAGS[self.tags] {
            frame.extend([tpid.to_be_bytes(), tag.to_be_bytes()].concat());
        }
        frame.extend(if self.is_v6 { [0x86, 0xdd] } else { [8, 0] });
        self.push_ip(&mut frame, &mut numbers);
        self.push_transport(&mut frame, &mut numbers);
        while frame.len() < self.header_len() + self.payload {
            frame.extend(numbers.next().to_le_bytes());
        }
        frame.truncate(self.header_len() + self.payload);
        let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let place = reset_pseudo_header(&mut frame, &layers).unwrap();
        let kind = match (self.kind, self.is_v6) {
            (Kind::Tcp, false) => GsoKind::TcpV4,
            (Kind::Tcp, true) => GsoKind::TcpV6,
            (Kind::Uso, _) => GsoKind::Udp,
            (Kind::Ufo, _) => GsoKind::UdpFragment,
        };
        let ecn = self.kind == Kind::Tcp && self.flags & CWR != 0;
        let gso = Some(Gso { kind, ecn, size: self.size });
        (frame, OffloadMeta { checksum: place.into(), gso })
    }

    fn push_ip(&self, frame: &mut Vec<u8>, numbers: &mut Numbers) {
        let transport = if self.kind == Kind::Tcp { 6 } else { 17 };
        let len = self.header_len() - self.network_at() + self.payload;
        let [class, flow, id_high, id_low, ttl, ..] = numbers.bytes::<8>();
        if self.is_v6 {
            let extensions = EXTENSIONS_V6[self.ip_options];
            let len = u16::try_from(len - 40).unwrap().to_be_bytes();
            let next = |index: usize| extensions.get(index).map_or(transport, |&(n, _)| n);
            frame.extend([0x60 | class >> 4, class << 4 | flow & 15, flow, id_low, len[0], len[1]]);
            frame.extend([next(0), ttl]);
            frame.extend([0xfd, 0, 0, 9, 0, 0, 0, 0]);
            frame.extend(numbers.bytes::<8>());
            frame.extend([0xfd, 0, 0, 9, 0, 0, 0, 0]);
            frame.extend(numbers.bytes::<8>());
            for (index, &(number, len)) in extensions.iter().enumerate() {
                let pad = u8::try_from(len).unwrap() - 4;
                frame.extend([next(index + 1), u8::try_from(len / 8 - 1).unwrap()]);
                // A routing header at its end (type 3, no segments left), or padding.
                frame.extend(if number == 43 { [3, 0] } else { [1, pad] });
                frame.extend(std::iter::repeat_n(0, pad.into()));
            }
        } else {
            let options = OPTIONS_V4[self.ip_options];
            let len = u16::try_from(len).unwrap().to_be_bytes();
            let version = 0x45 + u8::try_from(options.len() / 4).unwrap();
            let dont_fragment = if self.kind == Kind::Ufo { 0 } else { class & 0x40 };
            frame.extend([version, class, len[0], len[1], id_high, id_low, dont_fragment, 0]);
            frame.extend([ttl | 1, transport, 0, 0, 10, 9, 0]);
            frame.extend([flow, 10, 9, 1, class]);
            frame.extend(options);
            let at = self.network_at();
            let sum = ringfence_offload::checksum::internet_checksum(&frame[at..]);
            frame[at + 10..at + 12].copy_from_slice(&sum.to_be_bytes());
        }
    }

    fn push_transport(&self, frame: &mut Vec<u8>, numbers: &mut Numbers) {
        frame.extend(numbers.bytes::<4>());
        if self.kind == Kind::Tcp {
            // Sequence numbers close to wrap-around.
            let seq = u32::MAX - u32::try_from(numbers.next() % 70_000).unwrap();
            frame.extend(seq.to_be_bytes());
            frame.extend(numbers.bytes::<4>());
            let words = 5 + u8::try_from(self.tcp_options().len() / 4).unwrap();
            frame.extend([words << 4, self.flags]);
            frame.extend(numbers.bytes::<2>());
            frame.extend([0, 0, 0, 9 & self.flags]);
            frame.extend(self.tcp_options());
        } else {
            frame.extend(u16::try_from(8 + self.payload).unwrap().to_be_bytes());
            frame.extend([0, 0]);
        }
    }
}

/// Returns every combination of protocol, tags, options and flags, with every applicable size.
pub fn corpus() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    let mut seed = 0;
    for (kind, is_v6, tags, ip_options) in combinations() {
        let (tcp_options, flags) = match kind {
            Kind::Tcp => (OPTIONS_TCP.len(), &FLAGS[..]),
            Kind::Uso | Kind::Ufo => (1, &[0][..]),
        };
        for tcp_options in 0..tcp_options {
            for &flags in flags {
                let recipe = |size, payload, seed| Recipe {
                    kind,
                    is_v6,
                    tags,
                    ip_options,
                    tcp_options,
                    flags,
                    size,
                    payload,
                    seed,
                };
                for &(size, payload) in sizes(kind) {
                    seed += 1;
                    let most = recipe(size, 0, 0).payload_max();
                    recipes.push(recipe(size, payload.min(most), seed));
                }
            }
        }
    }
    recipes
}

fn combinations() -> impl Iterator<Item = (Kind, bool, usize, usize)> {
    let kinds = [Kind::Tcp, Kind::Uso, Kind::Ufo].into_iter();
    kinds.flat_map(|kind| {
        [false, true].into_iter().flat_map(move |is_v6| {
            (0..TAGS.len()).flat_map(move |tags| (0..5).map(move |ip| (kind, is_v6, tags, ip)))
        })
    })
}

/// Returns segment sizes with payload lengths: one byte over, whole multiples, odd ones, tiny ones, jumbo
/// ones, and the largest that fits an IP packet.
fn sizes(kind: Kind) -> &'static [(u16, usize)] {
    match kind {
        Kind::Tcp => {
            &[(1448, 1449), (1448, 4344), (1447, 7001), (8, 93), (8948, 40_001), (1448, usize::MAX)]
        }
        Kind::Uso => &[
            (1472, 1473),
            (1200, 4800),
            (1199, 7001),
            (1, 128),
            (9, 128 * 9 - 1),
            (512, usize::MAX),
            (1472, usize::MAX),
        ],
        Kind::Ufo => &[
            (1480, 1473),
            (1480, 1480 * 3 - 8),
            (1232, 7001),
            (8, 93),
            (64, 1000),
            (8960, 40_001),
            (1480, usize::MAX),
        ],
    }
}

/// Returns the segments that `offload` makes of a frame, with their metadata.
pub fn segments(frame: &[u8], meta: OffloadMeta, complete: bool) -> Vec<(Vec<u8>, OffloadMeta)> {
    let layers = Layers::parse(frame, u32::try_from(frame.len()).unwrap()).unwrap();
    let headers = &frame[..frame.len().min(HEADER_MAX)];
    let mut segmenter =
        Segmenter::new(headers, &layers, meta).unwrap().with_fragment_id(FRAGMENT_ID);
    let count = segmenter.segments();
    let mut room = [0; HEADER_MAX];
    let mut made = Vec::new();
    loop {
        let next = if complete {
            segmenter.next_complete(&mut room, &mut { frame }).unwrap()
        } else {
            segmenter.next_partial(&mut room).unwrap()
        };
        let Some(segment) = next else { break };
        let payload = segment.payload.start as usize..segment.payload.end as usize;
        made.push(([&room[..segment.header_len], &frame[payload]].concat(), segment.meta));
    }
    assert_eq!(made.len(), count as usize, "as many as were announced");
    made
}

/// Formats `left` and `right` around their first difference.
pub fn difference(left: &[u8], right: &[u8]) -> String {
    let at =
        left.iter().zip(right).position(|(a, b)| a != b).unwrap_or(left.len().min(right.len()));
    let show = |bytes: &[u8]| {
        let end = bytes.len().min(120);
        bytes[..end].iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    let (l, r) = (left.len(), right.len());
    format!("differ at byte {at} (lengths {l} and {r}):\n  {}\n  {}", show(left), show(right))
}
