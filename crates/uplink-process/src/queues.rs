//! Number of queues of an interface (`--queues`): each has a thread of the uplink.

use std::num::NonZero;

use ringfence_sys::numbers::bounded;

/// Maximum number of queues of an uplink's interface. One message carries a descriptor of the TAP and one of a device
/// for each.
pub const QUEUES_MAX: u32 = 8;

/// Word for as many queues as there are processors.
const AUTO: &str = "auto";

/// Parses a number of queues from 1 to `max`, or `auto`.
///
/// # Errors
///
/// Returns the valid values.
pub fn parse_queues(text: &str, max: u32) -> Result<u32, String> {
    if text == AUTO {
        return Ok(processors().min(max));
    }
    let number = text.parse().ok().filter(|queues| (1..=max).contains(queues));
    number.ok_or_else(|| format!("give a number from 1 to {max}, or `{AUTO}`"))
}

/// Returns the number of queues for an uplink: at most one for each processor.
pub fn queues_of_uplink(wanted: u32) -> u32 {
    wanted.min(processors()).clamp(1, QUEUES_MAX)
}

/// Returns the number of processors that this process may use.
fn processors() -> u32 {
    bounded(std::thread::available_parallelism().map_or(1, NonZero::get), u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::BATCH;
    use ringfence_sys::numbers::usize_from;

    #[test]
    fn descriptors_of_all_queues_fit_into_one_message() {
        assert!(2 * usize_from(QUEUES_MAX) <= BATCH);
    }

    #[test]
    fn auto_is_the_number_of_processors_within_the_limit() {
        assert_eq!(parse_queues("auto", u32::MAX), Ok(processors()));
        assert_eq!(parse_queues("auto", 1), Ok(1));
        assert!(queues_of_uplink(u32::MAX) <= processors().min(QUEUES_MAX));
        assert_eq!(queues_of_uplink(0), 1);
    }

    #[test]
    fn number_beyond_the_limit_is_refused_with_the_valid_values() {
        assert_eq!(parse_queues("8", 8), Ok(8));
        for text in ["0", "9", "", "-1", "Auto", "2.5"] {
            let error = parse_queues(text, 8).unwrap_err();
            assert!(error.contains("1 to 8, or `auto`"), "{text}: {error}");
        }
    }
}
