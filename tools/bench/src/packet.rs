//! Packets of a benchmark: numbered, checksummed, and verified by the sink.
//!
//! ```text
//!  0               6               12      14      16
//!  +-- destination + source -------+ 88B5 -+- 0 ---+
//!  16              24      28      32              40
//!  +-- sequence ---+ length+ flags +-- check ------+ pattern ...
//! ```
//!
//! A packet with headers of its own ([`Template::framed`]) has these fields at the next multiple of 8 bytes:
//!
//! ```text
//!  0                         8               16
//!  +-- sequence -------------+-- check ------+ pattern ...
//! ```
//!
//! Integers are little-endian. The pattern is the same in every packet of a row, except that the
//! sequence number is repeated every 512 bytes. Pieces of two packets thus never form a valid one.
//!
//! The sum ([`Sum`]) is linear in the packet's words. The generator therefore computes it with one
//! multiplication for a packet of any length, while the sink sums every received byte.

use ringfence_frame::batch::{FrameView, SegmentView};
use ringfence_memory::{LentSlice, OutOfRange};

use super::params::Verify;

/// Minimum bytes of a packet: the shortest Ethernet frame without its check sequence.
pub(super) const SIZE_MIN: i64 = 60;
/// Maximum bytes of a packet, the range of a netif request.
pub(super) const SIZE_MAX: i64 = 65_535;

/// Local experimental EtherType (IEEE 802).
const ETHERTYPE: [u8; 2] = [0x88, 0xB5];
const SEQUENCE: usize = 16;
const LENGTH: usize = 24;
const FLAGS: usize = 28;
const CHECK: usize = 32;
const PATTERN: usize = 40;
/// First bytes of a packet read in pieces that are kept: headers, and the sequence number.
const READ_HEADER: usize = 64;
/// Distance between two copies of the sequence number.
const STAMP_EVERY: usize = 512;
/// Flag of the last packet of a phase.
const LAST: u32 = 1;

/// Sum of a valid packet.
const WHOLE: u64 = 0x52_69_6E_67_66_65_6E_63;

const LANES: usize = 8;
const BLOCK: usize = 8 * LANES;

/// Checksum of 64-bit words in eight lanes, each with a running sum of its sums (as in Fletcher's), so
/// that the position of a word matters. Arithmetic is modulo 2^64, hence linear; a change of any one
/// word changes the sum.
#[derive(Clone)]
struct Sum {
    plain: [u64; LANES],
    running: [u64; LANES],
    part: [u8; BLOCK],
    filled: usize,
}

/// Returns the coefficient of a lane: odd for plain sums and even for running ones. The factor of every
/// word is thus odd, and no bit of the word is lost.
const fn factor(lane: u64, odd: u64) -> u64 {
    (0x9E37_79B9_7F4A_7C15u64.wrapping_mul(2 * lane + 3 + 64 * odd) & !1) | odd
}

impl Sum {
    fn new() -> Sum {
        Sum { plain: [0; LANES], running: [0; LANES], part: [0; BLOCK], filled: 0 }
    }

    #[inline]
    fn block(&mut self, block: &[u8; BLOCK]) {
        let (words, _) = block.as_chunks::<8>();
        for (lane, word) in words.iter().enumerate() {
            self.plain[lane] = self.plain[lane].wrapping_add(u64::from_le_bytes(*word));
            self.running[lane] = self.running[lane].wrapping_add(self.plain[lane]);
        }
    }

    fn add(&mut self, mut bytes: &[u8]) {
        if self.filled > 0 {
            let n = bytes.len().min(BLOCK - self.filled);
            let (now, rest) = bytes.split_at(n);
            self.part[self.filled..self.filled + n].copy_from_slice(now);
            self.filled += n;
            bytes = rest;
            if self.filled < BLOCK {
                return;
            }
            let part = self.part;
            self.block(&part);
            self.filled = 0;
        }
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        for block in blocks {
            self.block(block);
        }
        self.part[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    fn finish(mut self) -> u64 {
        if self.filled > 0 {
            self.part[self.filled..].fill(0);
            let part = self.part;
            self.block(&part);
        }
        let mut sum = 0u64;
        for (lane, at) in (0u64..).zip(0..LANES) {
            sum = sum
                .wrapping_add(self.plain[at].wrapping_mul(factor(lane, 1)))
                .wrapping_add(self.running[at].wrapping_mul(factor(lane, 0)));
        }
        sum
    }

    fn of(bytes: &[u8]) -> u64 {
        let mut sum = Sum::new();
        sum.add(bytes);
        sum.finish()
    }
}

/// Returns the inverse of an odd number modulo 2^64 (Newton: each step doubles the correct bits).
fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    for _ in 0..6 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
    }
    x
}

/// Offsets of the variable fields.
#[derive(Clone, Copy)]
struct Fields {
    sequence: usize,
    /// Offset of the flags; a packet without them is never marked as the last one.
    flags: Option<usize>,
    check: usize,
}

impl Fields {
    /// Fields of a packet without other headers.
    const BARE: Fields = Fields { sequence: SEQUENCE, flags: Some(FLAGS), check: CHECK };

    /// Returns the fields behind headers of so many bytes. The check must be a word of the sum.
    fn behind(headers: usize) -> Fields {
        let sequence = headers.next_multiple_of(8);
        Fields { sequence, flags: None, check: sequence + 8 }
    }
}

/// Generator of packets of one size.
pub(super) struct Template {
    bytes: Vec<u8>,
    fields: Fields,
    /// Difference of the valid sum and that of the packet with sequence 0, no flags and check 0.
    lacking: u64,
    per_sequence: u64,
    last: u64,
    per_check_inverse: u64,
}

impl Template {
    /// Creates a template of `size` bytes, which is between [`SIZE_MIN`] and [`SIZE_MAX`].
    pub(super) fn new(size: u32) -> Template {
        // Locally administered addresses of the two sides.
        Template::between(size, [2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1])
    }

    /// Creates a template with these addresses.
    pub(super) fn between(size: u32, destination: [u8; 6], source: [u8; 6]) -> Template {
        let len = size as usize;
        let mut bytes = vec![0; len];
        bytes[..6].copy_from_slice(&destination);
        bytes[6..12].copy_from_slice(&source);
        bytes[12..14].copy_from_slice(&ETHERTYPE);
        bytes[LENGTH..FLAGS].copy_from_slice(&size.to_le_bytes());
        Template::complete(bytes, PATTERN, Fields::BARE)
    }

    /// Creates a template of `size` bytes that begins with these headers, and has room for the fields.
    pub(super) fn framed(size: u32, headers: &[u8]) -> Template {
        let mut bytes = headers.to_vec();
        bytes.resize(size as usize, 0);
        let fields = Fields::behind(headers.len());
        Template::complete(bytes, fields.check + 8, fields)
    }

    /// Fills a packet from `pattern` on, and computes the contributions to its sum.
    fn complete(mut bytes: Vec<u8>, pattern: usize, fields: Fields) -> Template {
        let len = bytes.len();
        let mut state = 0x2545_F491_4F6C_DD1Du64;
        for byte in &mut bytes[pattern..] {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *byte = state.to_le_bytes()[3];
        }
        stamp(&mut bytes, fields.sequence, 0);
        // By linearity: the contribution of a one in each variable field.
        let unit = |write: &dyn Fn(&mut [u8])| {
            let mut one = vec![0; len];
            write(&mut one);
            Sum::of(&one)
        };
        let last = fields
            .flags
            .map(|at| unit(&|one| one[at..at + 4].copy_from_slice(&LAST.to_le_bytes())));
        Template {
            lacking: WHOLE.wrapping_sub(Sum::of(&bytes)),
            per_sequence: unit(&|one| stamp(one, fields.sequence, 1)),
            last: last.unwrap_or(0),
            per_check_inverse: inverse(unit(&|one| one[fields.check] = 1)),
            bytes,
            fields,
        }
    }

    /// Returns the packet without a number, which [`Template::number`] completes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Numbers a packet of this template, fresh or reused.
    #[inline]
    pub(super) fn number(&self, packet: &mut [u8], sequence: u64, last: bool) {
        stamp(packet, self.fields.sequence, sequence);
        let (flags, check) = self.tail(sequence, last);
        if let Some(at) = self.fields.flags {
            packet[at..at + 4].copy_from_slice(&flags);
        }
        packet[self.fields.check..][..8].copy_from_slice(&check);
    }

    /// Numbers a packet of this template at an offset of lent memory. It is not the last of a phase.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet is not in the memory.
    pub(super) fn number_lent(
        &self,
        memory: &LentSlice,
        at: usize,
        sequence: u64,
    ) -> Result<(), OutOfRange> {
        let stamp = sequence.to_le_bytes();
        memory.copy_from(at + self.fields.sequence, &stamp)?;
        for offset in stamps(self.bytes.len()) {
            memory.copy_from(at + offset, &stamp)?;
        }
        let (flags, check) = self.tail(sequence, false);
        if let Some(offset) = self.fields.flags {
            memory.copy_from(at + offset, &flags)?;
        }
        memory.copy_from(at + self.fields.check, &check)
    }

    /// Returns the flags and the check of a packet.
    #[inline]
    fn tail(&self, sequence: u64, last: bool) -> ([u8; 4], [u8; 8]) {
        let mut missing = self.lacking.wrapping_sub(self.per_sequence.wrapping_mul(sequence));
        let flags = if last {
            missing = missing.wrapping_sub(self.last);
            LAST
        } else {
            0
        };
        let check = missing.wrapping_mul(self.per_check_inverse);
        (flags.to_le_bytes(), check.to_le_bytes())
    }
}

/// Returns the offsets of the copies of the sequence number in a packet of this length.
fn stamps(len: usize) -> impl Iterator<Item = usize> {
    (STAMP_EVERY..).step_by(STAMP_EVERY).take_while(move |at| at + 8 <= len)
}

#[inline]
fn stamp(packet: &mut [u8], at: usize, sequence: u64) {
    let sequence = sequence.to_le_bytes();
    packet[at..at + 8].copy_from_slice(&sequence);
    for at in stamps(packet.len()) {
        packet[at..at + 8].copy_from_slice(&sequence);
    }
}

/// Packet that is read in pieces.
pub(super) struct Reading {
    sum: Sum,
    header: [u8; READ_HEADER],
    len: usize,
}

impl Reading {
    pub(super) fn new() -> Reading {
        Reading { sum: Sum::new(), header: [0; READ_HEADER], len: 0 }
    }

    /// Adds the next bytes.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        if let Some(header) = self.header.get_mut(self.len..) {
            let part = header.len().min(bytes.len());
            header[..part].copy_from_slice(&bytes[..part]);
        }
        self.sum.add(bytes);
        self.len += bytes.len();
    }
}

/// Defect of a packet.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Bad {
    #[error("packet {expected} arrived damaged: its checksum is wrong")]
    Damaged { expected: u64 },
    #[error("packet {expected} arrived with {found} bytes in place of {size}")]
    Length { expected: u64, found: usize, size: usize },
    #[error("packets {from} to {to} were lost: packet {next} came next", next = to + 1)]
    Lost { from: u64, to: u64 },
    #[error("packet {found} was repeated or out of order: packet {expected} was due")]
    Repeated { found: u64, expected: u64 },
}

/// Verifier of packets: each must be intact and follow its predecessor.
pub(super) struct Checker {
    verify: Verify,
    fields: Fields,
    size: usize,
    expected: u64,
    fetched: u64,
}

impl Checker {
    #[cfg(test)]
    pub(super) fn new(size: u32) -> Checker {
        Checker::verifying(size, Verify::Full)
    }

    /// Creates a checker that verifies this much of each packet.
    pub(super) fn verifying(size: u32, verify: Verify) -> Checker {
        let fields = Fields::BARE;
        Checker { verify, fields, size: size as usize, expected: 0, fetched: 0 }
    }

    /// Creates a checker of all bytes of packets with headers of so many bytes ([`Template::framed`]).
    pub(super) fn framed(size: u32, headers: usize) -> Checker {
        Checker { fields: Fields::behind(headers), ..Checker::verifying(size, Verify::Full) }
    }

    /// Returns the number of packets so far.
    pub(super) fn packets(&self) -> u64 {
        self.expected
    }

    /// Continues with the packet after `sequence`.
    pub(super) fn resume_behind(&mut self, sequence: u64) {
        self.expected = sequence + 1;
    }

    /// Returns the bytes fetched from lent memory for the sums.
    pub(super) fn fetched(&self) -> u64 {
        self.fetched
    }

    /// Verifies the next packet. Returns `true` if it is the last of its phase.
    #[inline]
    pub(super) fn take(&mut self, frame: FrameView<'_>) -> Result<bool, Bad> {
        if self.verify == Verify::Sequence {
            // Without a sum, the expected value stands in for it.
            return self.judge(WHOLE, frame.header(), frame.len());
        }
        let sum = self.sum(frame);
        self.judge(sum, frame.header(), frame.len())
    }

    /// Verifies the next packet, which was read in pieces.
    pub(super) fn take_reading(&mut self, reading: Reading) -> Result<bool, Bad> {
        self.judge(reading.sum.finish(), &reading.header, reading.len)
    }

    /// Sums all bytes of a packet.
    fn sum(&mut self, frame: FrameView<'_>) -> u64 {
        let mut sum = Sum::new();
        if let Some(bytes) = frame.contiguous() {
            sum.add(bytes);
        } else {
            for piece in frame.pieces() {
                if let SegmentView::Lent(_, _, len) = piece {
                    self.fetched += len as u64;
                }
                piece.for_each_piece(|bytes| sum.add(bytes));
            }
        }
        sum.finish()
    }

    #[inline]
    fn judge(&mut self, sum: u64, header: &[u8], len: usize) -> Result<bool, Bad> {
        let expected = self.expected;
        if len != self.size {
            return Err(Bad::Length { expected, found: len, size: self.size });
        }
        let field = |at: usize| header.get(at..)?.first_chunk::<8>().copied();
        let Some(sequence) = field(self.fields.sequence).filter(|_| sum == WHOLE) else {
            return Err(Bad::Damaged { expected });
        };
        let sequence = u64::from_le_bytes(sequence);
        if sequence > expected {
            return Err(Bad::Lost { from: expected, to: sequence - 1 });
        }
        if sequence < expected {
            return Err(Bad::Repeated { found: sequence, expected });
        }
        self.expected += 1;
        let flags = self.fields.flags.and_then(|at| header.get(at..)?.first_chunk::<4>());
        Ok(flags.is_some_and(|flags| u32::from_le_bytes(*flags) == LAST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_frame::batch::Batch;
    use ringfence_offload::OffloadMeta;

    fn check(checker: &mut Checker, packet: &[u8]) -> Result<bool, Bad> {
        let mut batch = Batch::default();
        let at = batch.reserve(packet.len()).unwrap();
        batch.scratch_mut(at..at + packet.len()).unwrap().copy_from_slice(packet);
        batch.push_contiguous(at, packet.len(), OffloadMeta::PLAIN).unwrap();
        checker.take(batch.get(0).unwrap())
    }

    fn packet(template: &Template, sequence: u64, last: bool) -> Vec<u8> {
        let mut packet = template.bytes().to_vec();
        template.number(&mut packet, sequence, last);
        packet
    }

    const SIZES: [u32; 9] = [60, 64, 65, 127, 512, 520, 1500, 4097, 65_535];

    #[test]
    fn numbered_packets_are_accepted_in_order() {
        for size in SIZES {
            let template = Template::new(size);
            let mut checker = Checker::new(size);
            let mut reused = template.bytes().to_vec();
            for sequence in 0..20 {
                template.number(&mut reused, sequence, sequence == 19);
                assert_eq!(check(&mut checker, &reused), Ok(sequence == 19), "{size}: {sequence}");
            }
        }
    }

    #[test]
    fn packet_with_any_flipped_bit_is_damaged() {
        for size in [60, 64, 700] {
            let template = Template::new(size);
            for bit in 0..8 * size as usize {
                let mut packet = packet(&template, 0, false);
                packet[bit / 8] ^= 1 << (bit % 8);
                let seen = check(&mut Checker::new(size), &packet);
                assert_eq!(seen, Err(Bad::Damaged { expected: 0 }), "{size}: bit {bit}");
            }
        }
    }

    #[test]
    fn packet_with_swapped_or_stale_pages_is_damaged() {
        let template = Template::new(65_000);
        let damaged = Err(Bad::Damaged { expected: 0 });
        let mut exchanged = packet(&template, 0, false);
        let (a, b) = exchanged[4096..3 * 4096].split_at_mut(4096);
        a.swap_with_slice(b);
        assert_eq!(check(&mut Checker::new(65_000), &exchanged), damaged);
        let mut stale = packet(&template, 0, false);
        stale[8192..12288].copy_from_slice(&packet(&template, 7, false)[8192..12288]);
        assert_eq!(check(&mut Checker::new(65_000), &stale), damaged);
    }

    #[test]
    fn lost_repeated_and_truncated_packets_return_distinct_errors() {
        let template = Template::new(64);
        let mut checker = Checker::new(64);
        assert_eq!(check(&mut checker, &packet(&template, 0, false)), Ok(false));
        let lost = check(&mut checker, &packet(&template, 3, false));
        assert_eq!(lost, Err(Bad::Lost { from: 1, to: 2 }));
        let again = check(&mut checker, &packet(&template, 0, false));
        assert_eq!(again, Err(Bad::Repeated { found: 0, expected: 1 }));
        let cut = check(&mut checker, &packet(&template, 1, false)[..60]);
        assert_eq!(cut, Err(Bad::Length { expected: 1, found: 60, size: 64 }));
    }

    #[test]
    fn packet_with_headers_is_accepted_and_damaged_by_any_flipped_bit() {
        for (size, headers) in [(64, 42), (65, 42), (600, 54)] {
            let template = Template::framed(size, &vec![0x45; headers]);
            let mut checker = Checker::framed(size, headers);
            for sequence in 0..3 {
                let mut reading = Reading::new();
                reading.add(&packet(&template, sequence, false));
                assert_eq!(checker.take_reading(reading), Ok(false), "{size}: {sequence}");
            }
            for bit in 0..8 * size as usize {
                let mut packet = packet(&template, 3, false);
                packet[bit / 8] ^= 1 << (bit % 8);
                let mut reading = Reading::new();
                reading.add(&packet);
                let seen = checker.take_reading(reading);
                assert_eq!(seen, Err(Bad::Damaged { expected: 3 }), "{size}: bit {bit}");
            }
        }
    }

    #[test]
    fn packet_numbered_in_lent_memory_is_accepted_from_any_pieces() {
        for size in SIZES {
            let (template, mut checker) = (Template::new(size), Checker::new(size));
            let memory = LentSlice::anonymous(size as usize + 7);
            memory.copy_from(7, template.bytes()).unwrap();
            for (sequence, cut) in [1, 13, 39, 41, 512, 4096].into_iter().enumerate() {
                template.number_lent(&memory, 7, sequence as u64).unwrap();
                let mut bytes = vec![0; size as usize];
                memory.copy_to(7, &mut bytes).unwrap();
                let mut reading = Reading::new();
                bytes.chunks(cut).for_each(|piece| reading.add(piece));
                assert_eq!(checker.take_reading(reading), Ok(false), "{size}: pieces of {cut}");
            }
            let mut reading = Reading::new();
            reading.add(&packet(&template, 9, false));
            assert_eq!(checker.take_reading(reading), Err(Bad::Lost { from: 6, to: 8 }));
        }
    }

    #[test]
    fn sum_is_independent_of_piece_boundaries() {
        let bytes = packet(&Template::new(1500), 5, false);
        for cut in [1, 13, 63, 64, 65, 100, 256, 1499] {
            let mut sum = Sum::new();
            bytes.chunks(cut).for_each(|piece| sum.add(piece));
            assert_eq!(sum.finish(), WHOLE, "pieces of {cut}");
        }
    }
}
