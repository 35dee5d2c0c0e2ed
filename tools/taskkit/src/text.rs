//! Numbers and durations in the text of reports.

use std::time::Duration;

/// Formats a number with a noun in singular or plural: `1 test`, `2 tests`.
pub fn count<N: TryInto<u64>>(number: N, what: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Formats a duration: `0.4 s`, `3 min 07 s`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_of_one_is_singular() {
        assert_eq!(count(1_u64, "test"), "1 test");
        assert_eq!(count(0_usize, "test"), "0 tests");
    }

    #[test]
    fn duration_is_formatted_in_seconds_or_minutes() {
        assert_eq!(duration(Duration::from_millis(400)), "0.4 s");
        assert_eq!(duration(Duration::from_secs(187)), "3 min 07 s");
    }
}
