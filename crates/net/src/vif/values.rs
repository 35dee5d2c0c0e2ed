//! Values that a toolstack writes for a vif: the Ethernet address.
//!
//! The parser accepts exactly the documented form. Its errors state the expected form.

use ringfence_switch::forwarding::Mac;

/// Reasons for which a text is not an Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MacError {
    /// Text that is not six pairs of hexadecimal digits.
    #[error("an Ethernet address has six pairs of hexadecimal digits, as in 00:16:3e:01:02:03")]
    Form,
    /// Group address, or zero.
    #[error(
        "that is not the address of one station: the first byte must be even, and not all zero"
    )]
    NotAStation,
}

/// Parses the Ethernet address of one station, as in `00:16:3e:01:02:03`.
///
/// # Errors
///
/// Returns [`MacError`] if the text is not such an address.
pub fn parse_mac(text: &[u8]) -> Result<Mac, MacError> {
    let mut mac = [0; 6];
    let mut pairs = text.split(|&byte| byte == b':');
    for byte in &mut mac {
        let Some(&[high, low]) = pairs.next() else { return Err(MacError::Form) };
        *byte = nibble(high)? << 4 | nibble(low)?;
    }
    if pairs.next().is_some() {
        return Err(MacError::Form);
    }
    if mac[0] & 1 == 1 || mac == [0; 6] {
        return Err(MacError::NotAStation);
    }
    Ok(mac)
}

fn nibble(digit: u8) -> Result<u8, MacError> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        b'A'..=b'F' => Ok(digit - b'A' + 10),
        _ => Err(MacError::Form),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vif::toolstack::mac_text;
    use proptest::prelude::*;

    #[test]
    fn address_in_other_form_is_refused() {
        assert_eq!(parse_mac(b"00:16:3e:01:aB:03"), Ok([0, 0x16, 0x3e, 1, 0xab, 3]));
        for text in ["", "0:16:3e:01:02:03", "00-16-3e-01-02-03", "00:16:3e:01:02", "00163e010203"]
        {
            assert_eq!(parse_mac(text.as_bytes()), Err(MacError::Form), "{text}");
        }
        for text in ["00:16:3e:01:02:03:04", "00:16:3e:01:02:0g", " 00:16:3e:01:02:03"] {
            assert_eq!(parse_mac(text.as_bytes()), Err(MacError::Form), "{text}");
        }
        for text in ["01:00:5e:00:00:01", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"] {
            assert_eq!(parse_mac(text.as_bytes()), Err(MacError::NotAStation), "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_or_refused(text in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(mac) = parse_mac(&text) {
                prop_assert_eq!(parse_mac(mac_text(mac).as_bytes()), Ok(mac));
            }
        }

        #[test]
        fn formatted_address_parses_to_same(mut mac: Mac) {
            mac[0] &= 0xFE;
            mac[5] |= 1;
            prop_assert_eq!(parse_mac(mac_text(mac).as_bytes()), Ok(mac));
        }
    }
}
