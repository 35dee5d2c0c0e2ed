//! Rates: how much a guest may send, as a toolstack writes it.

use core::fmt;
use core::num::{NonZeroU32, NonZeroU64};
use core::str::FromStr;
use core::time::Duration;

use ringfence_wire::decimal::{self, NumberError};

/// How much a guest may send: so many bytes, given anew after each interval. As text
/// `BYTES,MICROSECONDS`, as libxl writes it (`rate=1MB/s@20ms` in a guest's configuration becomes
/// `20000,20000`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rate {
    bytes: NonZeroU64,
    micros: NonZeroU32,
}

/// Why a text is no rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RateError {
    /// Not two parts.
    #[error("a rate is two numbers and one comma: bytes, microseconds")]
    Form,
    /// A part is no number, or too large a one.
    #[error("the {part}: {why}")]
    Number {
        /// Which part.
        part: &'static str,
        /// What is wrong with it.
        why: NumberError,
    },
    /// A part is zero.
    #[error("the {part} of a rate cannot be 0")]
    Zero {
        /// Which part.
        part: &'static str,
    },
}

const BYTES: &str = "bytes";
const MICROS: &str = "microseconds";

/// The most bytes an interval may have: what any sum of credit stays far below an overflow with.
const BYTES_MAX: u64 = u64::MAX / 4;

impl Rate {
    /// A rate of `bytes` bytes each `micros` microseconds.
    ///
    /// # Errors
    ///
    /// [`RateError`].
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

    /// Reads what libxl writes.
    ///
    /// # Errors
    ///
    /// [`RateError`].
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

    /// Bytes given in each interval.
    pub fn bytes(self) -> u64 {
        self.bytes.get()
    }

    /// The interval.
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
    fn rates_are_read_as_libxl_writes_them() {
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
        fn any_bytes_are_a_rate_or_refused(text in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(rate) = Rate::parse(&text) {
                prop_assert_eq!(Rate::parse(rate.to_string().as_bytes()), Ok(rate));
            }
        }

        #[test]
        fn every_rate_reads_back(bytes in 1..=BYTES_MAX, micros in 1..=u32::MAX) {
            let rate = Rate::new(bytes, micros).unwrap();
            prop_assert_eq!(rate.to_string().parse(), Ok(rate));
        }
    }
}
