//! Rate limits of vifs, in the text form of toolstacks.

use core::fmt;
use core::num::{NonZeroU32, NonZeroU64};
use core::str::FromStr;
use core::time::Duration;

use ringfence_wire::decimal::{self, NumberError};

/// Rate limit: a number of bytes for each interval. Its text form is `BYTES,MICROSECONDS`, as libxl
/// writes it (`rate=1MB/s@20ms` in a guest's configuration becomes `20000,20000`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rate {
    bytes: NonZeroU64,
    micros: NonZeroU32,
}

/// Reasons for which a text is not a rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RateError {
    /// Text that does not have two parts.
    #[error("a rate is two numbers and one comma: bytes, microseconds")]
    Form,
    /// Part that is not a number, or is out of range.
    #[error("the {part}: {why}")]
    Number {
        part: &'static str,
        /// Error of the number parser.
        why: NumberError,
    },
    /// Part that is zero.
    #[error("the {part} of a rate cannot be 0")]
    Zero { part: &'static str },
}

const BYTES: &str = "bytes";
const MICROS: &str = "microseconds";

/// Maximum number of bytes per interval. Sums of credit stay far below an overflow.
const BYTES_MAX: u64 = u64::MAX / 4;

impl Rate {
    /// Makes a rate of `bytes` bytes per `micros` microseconds.
    ///
    /// # Errors
    ///
    /// Returns [`RateError`] if a number is zero or out of range.
    pub fn new(bytes: u64, micros: u32) -> Result<Rate, RateError> {
        if bytes > BYTES_MAX {
            let why = NumberError::TooLarge { value: bytes, limit: BYTES_MAX };
            return Err(RateError::Number { part: BYTES, why });
        }
        Ok(Rate {
            bytes: NonZeroU64::new(bytes).ok_or(RateError::Zero { part: BYTES })?,
            micros: NonZeroU32::new(micros).ok_or(RateError::Zero { part: MICROS })?,
        })
    }

    /// Parses the text that libxl writes.
    ///
    /// # Errors
    ///
    /// Returns [`RateError`] if the text is not a rate.
    pub fn parse(text: &[u8]) -> Result<Rate, RateError> {
        let mut parts = text.split(|&byte| byte == b',');
        let (Some(bytes), Some(micros), None) = (parts.next(), parts.next(), parts.next()) else {
            return Err(RateError::Form);
        };
        let number = |part, why| RateError::Number { part, why };
        let bytes = decimal::parse_up_to(bytes, BYTES_MAX).map_err(|why| number(BYTES, why))?;
        let micros = decimal::parse_u32(micros).map_err(|why| number(MICROS, why))?;
        Rate::new(bytes, micros)
    }

    /// Returns the number of bytes per interval.
    pub fn bytes(self) -> u64 {
        self.bytes.get()
    }

    /// Returns the length of the interval.
    pub fn interval(self) -> Duration {
        Duration::from_micros(self.micros.get().into())
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.bytes, self.micros)
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Rate, RateError> {
        Rate::parse(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn libxl_rate_text_is_parsed() {
        let rate = Rate::parse(b"20000,50000").unwrap();
        assert_eq!((rate.bytes(), rate.interval()), (20_000, Duration::from_millis(50)));
        for text in ["", ",", "1", "1,", ",1", "1,2,3", "1, 2", "+1,2", "-1,2", "1e3,2", "1,2\0"] {
            assert!(Rate::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        assert_eq!(Rate::parse(b"0,1"), Err(RateError::Zero { part: "bytes" }));
        assert_eq!(Rate::parse(b"1,0"), Err(RateError::Zero { part: "microseconds" }));
        assert!(Rate::parse(b"1,4294967296").is_err());
        assert!(Rate::parse(b"18446744073709551615,1").is_err(), "libxl's word for no limit");
        let why = Rate::parse(b"10 MB,50").map_err(|error| error.to_string());
        assert_eq!(why, Err("the bytes: byte 0x20 at position 2 is no decimal digit".to_owned()));
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_or_refused(text in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(rate) = Rate::parse(&text) {
                prop_assert_eq!(Rate::parse(rate.to_string().as_bytes()), Ok(rate));
            }
        }

        #[test]
        fn displayed_rate_parses_to_same_rate(bytes in 1..=BYTES_MAX, micros in 1..=u32::MAX) {
            let rate = Rate::new(bytes, micros).unwrap();
            prop_assert_eq!(rate.to_string().parse(), Ok(rate));
        }
    }
}
