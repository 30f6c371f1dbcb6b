//! The date for `strftime_now`.

use jiff::Timestamp;
use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use std::time::SystemTime;

/// A moment in UTC as Python's `strftime` writes it in the C locale. What is no field stays as it is.
pub fn strftime(time: SystemTime, pattern: &str) -> String {
    let config = Config::new().custom(PosixCustom::new()).lenient(true);
    let time = BrokenDownTime::from(Timestamp::try_from(time).unwrap_or(Timestamp::MAX));
    let parts = pattern.split("%%").map(|part| {
        // transformers' `datetime` has microseconds, always 0 here, and no zone.
        let part = part.replace("%f", "%6f");
        part.replace("%z", "").replace("%Z", "")
    });
    let pattern = parts.collect::<Vec<_>>().join("%%");
    let text = time.to_string_with_config(&config, &pattern);
    text.unwrap_or(pattern)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn dates() {
        for (seconds, expected) in [
            (0, "1970-01-01 Thu 001 00:00:00 12 AM"),
            (951_782_400, "2000-02-29 Tue 060 00:00:00 12 AM"),
            (1_720_256_703, "2024-07-06 Sat 188 09:05:03 09 AM"),
            (1_735_689_599, "2024-12-31 Tue 366 23:59:59 11 PM"),
            (4_107_542_400, "2100-03-01 Mon 060 00:00:00 12 AM"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(strftime(time, "%Y-%m-%d %a %j %H:%M:%S %I %p"), expected);
        }
        let time = UNIX_EPOCH + Duration::from_secs(1_720_256_703);
        for (pattern, expected) in [
            (
                "%-d %B %y, %e %b, %% %F %T %-I",
                "6 July 24,  6 Jul, % 2024-07-06 09:05:03 9",
            ),
            // What the C locale and a Python `datetime` without a zone give.
            (
                "%c|%x|%X|%D|%R",
                "Sat Jul  6 09:05:03 2024|07/06/24|09:05:03|07/06/24|09:05",
            ),
            ("%f|%z|%Z|%%f|%%%f|%%Z", "000000|||%f|%000000|%Z"),
            ("%k|%l|%u|%w|%U|%W|%C|%h", " 9| 9|6|6|26|27|20|Jul"),
            // What is no field stays.
            ("100% %! %", "100% %! %"),
        ] {
            assert_eq!(strftime(time, pattern), expected, "{pattern}");
        }
        let latest = UNIX_EPOCH + Duration::from_secs(1 << 60);
        assert_eq!(strftime(latest, "%Y"), "9999");
    }
}
