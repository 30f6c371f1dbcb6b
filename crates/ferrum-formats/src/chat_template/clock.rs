//! The date for `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// A moment in UTC as C's `strftime` writes it in the C locale.
pub fn strftime(time: SystemTime, pattern: &str) -> String {
    Clock::at(time).format(pattern)
}

/// A moment in UTC, taken apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    year: i64,
    /// From 0.
    month: usize,
    day: i64,
    /// From 0.
    day_of_year: i64,
    /// From Sunday.
    weekday: i64,
    second_of_day: i64,
}

impl Clock {
    pub(super) fn at(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => after.as_secs() as i64,
            Err(before) => -(before.duration().as_secs() as i64),
        };
        let days = seconds.div_euclid(86_400);
        // Years from March on, so that a leap day is the last of its year; 400 years repeat.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let of_era = shifted.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 {
            shifted_month + 2
        } else {
            shifted_month - 10
        };
        let year = year_of_era + era * 400 + i64::from(month < 2);
        let leap = i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let month = month as usize;
        let day_of_year =
            before.get(month).copied().unwrap_or(0) + day - 1 + if month > 1 { leap } else { 0 };
        Clock {
            year,
            month,
            day,
            day_of_year,
            weekday: (days + 4).rem_euclid(7),
            second_of_day: seconds.rem_euclid(86_400),
        }
    }

    /// `strftime`, in the C locale.
    pub(super) fn format(&self, pattern: &str) -> String {
        let mut out = String::new();
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = chars.next();
            // `%-d`: without padding.
            let bare = code == Some('-');
            if bare {
                code = chars.next();
            }
            match code {
                Some(code) => self.field(code, bare, &mut out),
                None => out.push('%'),
            }
        }
        out
    }

    fn field(&self, code: char, bare: bool, out: &mut String) {
        let number = |value: i64, width: usize, fill: char| {
            let text = value.to_string();
            let missing = if bare {
                0
            } else {
                width.saturating_sub(text.len())
            };
            std::iter::repeat_n(fill, missing).collect::<String>() + &text
        };
        let (hour, minute) = (self.second_of_day / 3_600, self.second_of_day / 60 % 60);
        let hour_of_12 = (hour + 11) % 12 + 1;
        let month = MONTHS.get(self.month).copied().unwrap_or("");
        let weekday = DAYS.get(self.weekday as usize).copied().unwrap_or("");
        out.push_str(&match code {
            'Y' => self.year.to_string(),
            'y' => number(self.year.rem_euclid(100), 2, '0'),
            'C' => number(self.year / 100, 2, '0'),
            'm' => number(self.month as i64 + 1, 2, '0'),
            'd' => number(self.day, 2, '0'),
            'e' => number(self.day, 2, ' '),
            'j' => number(self.day_of_year + 1, 3, '0'),
            'H' => number(hour, 2, '0'),
            'I' => number(hour_of_12, 2, '0'),
            'k' => number(hour, 2, ' '),
            'l' => number(hour_of_12, 2, ' '),
            'M' => number(minute, 2, '0'),
            'S' => number(self.second_of_day % 60, 2, '0'),
            'f' => "000000".into(),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'B' => month.into(),
            'b' | 'h' => month.get(..3).unwrap_or("").into(),
            'A' => weekday.into(),
            'a' => weekday.get(..3).unwrap_or("").into(),
            'w' => self.weekday.to_string(),
            'u' => ((self.weekday + 6) % 7 + 1).to_string(),
            'U' => number((self.day_of_year + 7 - self.weekday) / 7, 2, '0'),
            'W' => number((self.day_of_year + 7 - (self.weekday + 6) % 7) / 7, 2, '0'),
            'F' => self.format("%Y-%m-%d"),
            'D' | 'x' => self.format("%m/%d/%y"),
            'T' | 'X' => self.format("%H:%M:%S"),
            'R' => self.format("%H:%M"),
            'c' => self.format("%a %b %e %H:%M:%S %Y"),
            'z' | 'Z' => String::new(),
            'n' => "\n".into(),
            't' => "\t".into(),
            '%' => "%".into(),
            other => format!("%{other}"),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates() {
        for (seconds, expected) in [
            (0, "1970-01-01 Thu 001 00:00:00 12 AM"),
            (951_782_400, "2000-02-29 Tue 060 00:00:00 12 AM"),
            (1_720_256_703, "2024-07-06 Sat 188 09:05:03 09 AM"),
            (1_735_689_599, "2024-12-31 Tue 366 23:59:59 11 PM"),
            (4_107_542_400, "2100-03-01 Mon 060 00:00:00 12 AM"),
        ] {
            let clock = Clock::at(UNIX_EPOCH + Duration::from_secs(seconds));
            assert_eq!(clock.format("%Y-%m-%d %a %j %H:%M:%S %I %p"), expected);
        }
        let clock = Clock::at(UNIX_EPOCH + Duration::from_secs(1_720_256_703));
        assert_eq!(
            clock.format("%-d %B %y, %e %b, %% %F %T %-I"),
            "6 July 24,  6 Jul, % 2024-07-06 09:05:03 9"
        );
    }
}
