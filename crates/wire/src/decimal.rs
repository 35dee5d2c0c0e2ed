//! Decimal numbers as text, as both ends write them into the store.
//!
//! A peer wrote the text. The parsers accept digits only: no sign, blank, base prefix or terminator.
//! They bound the length before they read a digit.

use thiserror::Error;

/// Reasons for which a text is not the requested number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NumberError {
    #[error("empty where a number was expected")]
    Empty,
    /// Text longer than the largest value.
    #[error("{len} characters where a number has at most {limit} digits")]
    TooLong {
        /// Characters of the text.
        len: usize,
        /// Digits of the largest value.
        limit: usize,
    },
    /// Byte other than `0`..=`9`.
    #[error("byte {byte:#04x} at position {position} is no decimal digit")]
    NotADigit {
        /// Index of the byte, counted from 0.
        position: usize,
        byte: u8,
    },
    /// Value beyond the range.
    #[error("{value} is above the limit {limit}")]
    TooLarge {
        value: u64,
        /// Largest value that is accepted.
        limit: u64,
    },
}

/// Maximum digits of any number: those of `u64::MAX` minus one, so that the sum cannot overflow.
const DIGITS_MAX: usize = 19;

fn digits_of(limit: u64) -> usize {
    limit.checked_ilog10().map_or(1, |log| log as usize + 1).min(DIGITS_MAX)
}

/// Parses `text` as a number in 0..=`limit`. Texts of more than 19 digits are refused whatever the
/// limit, so the effective maximum of `limit` is 10¹⁹ − 1.
///
/// # Errors
/// The first rule of [`NumberError`] that the text breaks.
pub fn parse_up_to(text: &[u8], limit: u64) -> Result<u64, NumberError> {
    let digits = digits_of(limit);
    if text.is_empty() {
        return Err(NumberError::Empty);
    }
    if text.len() > digits {
        return Err(NumberError::TooLong { len: text.len(), limit: digits });
    }
    let mut value = 0u64;
    for (position, &byte) in text.iter().enumerate() {
        if !byte.is_ascii_digit() {
            return Err(NumberError::NotADigit { position, byte });
        }
        // At most 19 digits: below 10^19, which a u64 holds.
        value = value * 10 + u64::from(byte - b'0');
    }
    if value > limit {
        return Err(NumberError::TooLarge { value, limit });
    }
    Ok(value)
}

macro_rules! parse_as {
    ($name:ident, $int:ty) => {
        #[doc = concat!("Parses `text` as a `", stringify!($int), "`.")]
        ///
        /// # Errors
        /// The first rule of [`NumberError`] that the text breaks.
        pub fn $name(text: &[u8]) -> Result<$int, NumberError> {
            let limit = <$int>::MAX;
            let value = parse_up_to(text, u64::from(limit))?;
            <$int>::try_from(value)
                .map_err(|_| NumberError::TooLarge { value, limit: u64::from(limit) })
        }
    };
}
parse_as!(parse_u8, u8);
parse_as!(parse_u16, u16);
parse_as!(parse_u32, u32);

/// Parses a feature key: `0` gives `false`, `1` gives `true`, any other text is refused.
///
/// # Errors
/// The first rule of [`NumberError`] that the text breaks.
pub fn parse_bool(text: &[u8]) -> Result<bool, NumberError> {
    Ok(parse_up_to(text, 1)? == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn number_beyond_type_limit_is_rejected() {
        assert_eq!(parse_u8(b"255"), Ok(255));
        assert_eq!(parse_u8(b"256"), Err(NumberError::TooLarge { value: 256, limit: 255 }));
        assert_eq!(parse_u16(b"65535"), Ok(65535));
        assert_eq!(parse_u16(b"65536"), Err(NumberError::TooLarge { value: 65536, limit: 65535 }));
        assert_eq!(parse_u32(b"4294967295"), Ok(u32::MAX));
        assert_eq!(
            parse_u32(b"4294967296"),
            Err(NumberError::TooLarge { value: 1 << 32, limit: u64::from(u32::MAX) })
        );
        assert_eq!(parse_up_to(b"0", 0), Ok(0));
        assert_eq!(parse_up_to(&[b'9'; 19], u64::MAX), Ok(9_999_999_999_999_999_999));
        assert_eq!(
            parse_up_to(&[b'1'; 20], u64::MAX),
            Err(NumberError::TooLong { len: 20, limit: 19 })
        );
    }

    #[test]
    fn text_with_sign_blank_or_prefix_is_rejected() {
        for text in ["", " 1", "1 ", "+1", "-1", "0x1", "1\n", "1\0", "1_0", "٣"] {
            assert!(parse_u32(text.as_bytes()).is_err(), "{text:?}");
        }
        assert_eq!(
            parse_u16(b"000001"),
            Err(NumberError::TooLong { len: 6, limit: 5 }),
            "the length is bounded before the digits are read"
        );
    }

    #[test]
    fn feature_key_other_than_zero_or_one_is_rejected() {
        assert_eq!(parse_bool(b"0"), Ok(false));
        assert_eq!(parse_bool(b"1"), Ok(true));
        assert_eq!(parse_bool(b"2"), Err(NumberError::TooLarge { value: 2, limit: 1 }));
        assert!(parse_bool(b"true").is_err());
    }

    proptest! {
        #[test]
        fn parse_u32_of_any_bytes_matches_std_parser(text in prop::collection::vec(any::<u8>(), 0..12)) {
            let naive = core::str::from_utf8(&text)
                .ok()
                .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()) && text.len() <= 10)
                .and_then(|text| text.parse::<u32>().ok());
            prop_assert_eq!(parse_u32(&text).ok(), naive);
        }

        #[test]
        fn decimal_text_of_any_number_round_trips(value: u32) {
            prop_assert_eq!(parse_u32(value.to_string().as_bytes()), Ok(value));
        }
    }
}
