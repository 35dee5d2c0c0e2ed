//! Inner loop of the checksum: 16 bytes per iteration, in a form that compilers vectorise.
//!
//! The loop splits each 64-bit word into its 32-bit halves and adds them to 64-bit lanes. A lane cannot
//! overflow before 2^32 words, so the loop needs neither carries nor branches. The two lanes of each kind
//! fill one 128-bit register (x86-64 without target features: a load, a mask, a shift, two adds).
//! Compilers unroll the loop for wider registers. Measured alternatives were slower:
//!
//! * 32-bit words in eight lanes: the compiler shuffles, a sixth of the speed.
//! * 16-bit words in 32-bit lanes: half to four fifths of the speed.
//! * Add-with-carry in 128-bit integers: a little faster on long data, half as fast on short data, and no
//!   use of wide vectors.

/// Bytes per iteration: two 64-bit words.
const BLOCK: usize = 16;

/// Folds the carries of a sum of 16-bit words back into 16 bits.
pub(super) fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32); // ≤ 0x1_ffff_fffe
    let sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32); // ≤ 0x1_fffe
    let sum = (sum & 0xffff) + (sum >> 16); // ≤ 0xffff
    #[expect(clippy::cast_possible_truncation, reason = "bounded by 0xffff, line by line")]
    let folded = sum as u16;
    folded
}

/// Returns the folded sum of `bytes` as 16-bit words in the machine's own order.
///
/// Slices of more than 1 GiB are summed in parts, so that no lane can overflow.
pub(super) fn sum_native(bytes: &[u8]) -> u16 {
    const PART: usize = 1 << 30;
    if bytes.len() <= PART {
        return fold(sum_part(bytes));
    }
    fold(bytes.chunks(PART).map(|part| u64::from(fold(sum_part(part)))).sum())
}

/// Returns the sum of at most 2^30 bytes, which is below 2^61.
fn sum_part(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<BLOCK>();
    let mut low = [0u64; 2];
    let mut high = [0u64; 2];
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for ((low, high), word) in low.iter_mut().zip(&mut high).zip(words) {
            let word = u64::from_ne_bytes(*word);
            *low += word & 0xffff_ffff;
            *high += word >> 32;
        }
    }
    low[0] + low[1] + high[0] + high[1] + sum_rest(rest)
}

/// Returns the sum of fewer than [`BLOCK`] bytes.
fn sum_rest(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut sum: u64 = words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum();
    let (halves, rest) = rest.as_chunks::<2>();
    sum += halves.iter().map(|half| u64::from(u16::from_ne_bytes(*half))).sum::<u64>();
    if let [last] = rest {
        sum += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    sum
}
