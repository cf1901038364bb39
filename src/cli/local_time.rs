//! Local time for people: the offset from UTC by `TZ` and `/etc/localtime`, as the C library determines it.
//!
//! `TZ` is the name of a zone, the path of a zone file, or a rule such as `CET-1CEST,M3.5.0,M10.5.0/3`. A zone file (RFC
//! 8536) has the past changes of the offset and, at its end, a rule for the time after them.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::SystemTime;

use time::{Date, Month, OffsetDateTime, UtcOffset, Weekday};

const ZONES: &str = "/usr/share/zoneinfo";
const LOCAL_ZONE: &str = "/etc/localtime";

/// The local time of day.
pub(super) fn time_of_day(at: SystemTime) -> String {
    static ZONE: LazyLock<Zone> = LazyLock::new(Zone::local);
    let at = OffsetDateTime::from(at);
    let offset = ZONE.offset(at.unix_timestamp());
    let at = UtcOffset::from_whole_seconds(offset).map_or(at, |offset| at.to_offset(offset));
    let (hour, minute, second) = at.to_hms();
    format!("{hour:02}:{minute:02}:{second:02}.{:03}", at.millisecond())
}

#[derive(Debug, Default)]
struct Zone {
    /// When the offset changed, and what it was from then on. The oldest first.
    changes: Vec<(i64, i32)>,
    /// The offset before the first change.
    first: i32,
    /// For the time after the last change.
    rule: Option<Rule>,
}

impl Zone {
    fn local() -> Self {
        let read = |path: &Path| std::fs::read(path).ok().and_then(|bytes| Self::parse(&bytes));
        let Ok(name) = std::env::var("TZ") else {
            return read(Path::new(LOCAL_ZONE)).unwrap_or_default();
        };
        let path = name.strip_prefix(':').unwrap_or(&name);
        // An absolute path stays as it is.
        let file = Some(PathBuf::from(ZONES).join(path)).filter(|_| !path.is_empty());
        let by_rule = || Self { rule: Rule::parse(&name), ..Self::default() };
        file.and_then(|file| read(&file)).unwrap_or_else(by_rule)
    }

    /// Reads a zone file.
    fn parse(file: &[u8]) -> Option<Self> {
        let (_, body, _) = Block::parse(file, 4)?;
        // Version 1 has only the years up to 2037; every file of today has a second block.
        let (block, _, footer) = Block::parse(file.get(body..)?, 8)?;
        let footer = footer.strip_prefix(b"\n")?.split(|byte| *byte == b'\n').next()?;
        let rule = Rule::parse(str::from_utf8(footer).ok()?);
        Some(Self { changes: block.changes, first: block.first, rule })
    }

    fn offset(&self, at: i64) -> i32 {
        let past = self.changes.partition_point(|(since, _)| *since <= at);
        match (&self.rule, past.checked_sub(1).and_then(|index| self.changes.get(index))) {
            (Some(rule), _) if past == self.changes.len() => rule.offset(at),
            (_, Some((_, offset))) => *offset,
            (_, None) => self.first,
        }
    }
}

/// One of the two blocks of a zone file.
struct Block {
    changes: Vec<(i64, i32)>,
    first: i32,
}

impl Block {
    /// Reads a block with times of this many bytes. Returns its end and what follows.
    fn parse(file: &[u8], time_size: usize) -> Option<(Self, usize, &[u8])> {
        let count = |at: usize| -> Option<usize> {
            usize::try_from(u32::from_be_bytes(file.get(at..at + 4)?.try_into().ok()?)).ok()
        };
        if file.get(..4)? != b"TZif" {
            return None;
        }
        let [ut, standard, leaps, times, types, letters] =
            [count(20)?, count(24)?, count(28)?, count(32)?, count(36)?, count(40)?];
        let mut rest = file.get(44..)?;
        let mut take = |size: usize| -> Option<&[u8]> {
            let (piece, after) = rest.split_at_checked(size)?;
            rest = after;
            Some(piece)
        };
        let whens = take(times.checked_mul(time_size)?)?;
        let kinds = take(times)?;
        let offsets: Vec<i32> = take(types.checked_mul(6)?)?
            .chunks_exact(6)
            .filter_map(|kind| Some(i32::from_be_bytes(kind.get(..4)?.try_into().ok()?)))
            .collect();
        take(
            letters.checked_add(leaps.checked_mul(time_size + 4)?)?.checked_add(standard)?.checked_add(ut)?,
        )?;
        let changes = whens.chunks_exact(time_size).zip(kinds).filter_map(|(when, kind)| {
            let when = match time_size {
                4 => i64::from(i32::from_be_bytes(when.try_into().ok()?)),
                _ => i64::from_be_bytes(when.try_into().ok()?),
            };
            Some((when, *offsets.get(usize::from(*kind))?))
        });
        let block = Self { changes: changes.collect(), first: offsets.first().copied().unwrap_or_default() };
        Some((block, file.len() - rest.len(), rest))
    }
}

/// A rule such as `CET-1CEST,M3.5.0,M10.5.0/3`.
#[derive(Debug, PartialEq, Eq)]
struct Rule {
    standard: i32,
    /// The offset in summer, when it begins, and when it ends, in local time.
    summer: Option<(i32, YearDay, YearDay)>,
}

/// A weekday of a month, such as the last Sunday of March at 2:00.
#[derive(Debug, PartialEq, Eq)]
struct YearDay {
    month: Month,
    /// From 1; 5 is the last one.
    week: u8,
    weekday: Weekday,
    /// Seconds after midnight.
    time: i32,
}

impl Rule {
    fn parse(text: &str) -> Option<Self> {
        let (standard, rest) = parse_offset(skip_name(text)?)?;
        let standard = -standard;
        if rest.is_empty() {
            return Some(Self { standard, summer: None });
        }
        let rest = skip_name(rest)?;
        let (summer, rest) = match rest.strip_prefix(',') {
            Some(rest) => (standard + 3600, rest),
            None => {
                let (offset, rest) = parse_offset(rest)?;
                (-offset, rest.strip_prefix(',')?)
            }
        };
        let (begin, end) = rest.split_once(',')?;
        Some(Self { standard, summer: Some((summer, YearDay::parse(begin)?, YearDay::parse(end)?)) })
    }

    fn offset(&self, at: i64) -> i32 {
        let Some((summer, begin, end)) = &self.summer else { return self.standard };
        let local = at + i64::from(self.standard);
        let year = OffsetDateTime::from_unix_timestamp(local).map_or(1970, OffsetDateTime::year);
        let (Some(begin), Some(end)) = (begin.seconds(year), end.seconds(year)) else { return self.standard };
        let (begin, end) = (begin - i64::from(self.standard), end - i64::from(*summer));
        // In the south, summer begins in one year and ends in the next.
        let is_summer = if begin < end { begin <= at && at < end } else { at < end || begin <= at };
        if is_summer { *summer } else { self.standard }
    }
}

impl YearDay {
    fn parse(text: &str) -> Option<Self> {
        let (day, time) = match text.split_once('/') {
            Some((day, time)) => (day, parse_offset(time)?.0),
            None => (text, 2 * 3600),
        };
        let mut numbers = day.strip_prefix('M')?.split('.').map(|number| number.parse::<u8>().ok());
        let (month, week, weekday) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let weekday = Weekday::Sunday.nth_next(weekday);
        Some(Self { month: Month::try_from(month).ok()?, week, weekday, time })
    }

    /// The local time in seconds since 1970.
    fn seconds(&self, year: i32) -> Option<i64> {
        let first = Date::from_calendar_date(year, self.month, 1).ok()?;
        let after =
            (7 + self.weekday.number_days_from_sunday() - first.weekday().number_days_from_sunday()) % 7;
        let mut day = 1 + after + 7 * (self.week.clamp(1, 5) - 1);
        if day > self.month.length(year) {
            day -= 7;
        }
        let date = Date::from_calendar_date(year, self.month, day).ok()?;
        Some(date.midnight().assume_utc().unix_timestamp() + i64::from(self.time))
    }
}

/// What follows the name of a zone, such as `CET` or `<+03>`.
fn skip_name(text: &str) -> Option<&str> {
    match text.strip_prefix('<') {
        Some(quoted) => quoted.split_once('>').map(|(_, rest)| rest),
        None => {
            let end = text.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(text.len());
            text.get(end..).filter(|_| end >= 3)
        }
    }
}

/// Reads `[+-]hh[:mm[:ss]]` in seconds. Returns what follows it.
fn parse_offset(text: &str) -> Option<(i32, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && !"+-:".contains(c)).unwrap_or(text.len());
    let (offset, rest) = text.split_at_checked(end)?;
    let (sign, digits) = match offset.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, offset.strip_prefix('+').unwrap_or(offset)),
    };
    let mut numbers = digits.split(':').map(|number| number.parse::<i32>().ok());
    let hours = numbers.next()??;
    let [minutes, seconds] =
        [numbers.next().flatten(), numbers.next().flatten()].map(Option::unwrap_or_default);
    (hours <= 167).then_some((sign * (3600 * hours + 60 * minutes + seconds), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Timestamp;

    fn at(text: &str) -> i64 {
        OffsetDateTime::from(text.parse::<Timestamp>().unwrap().0).unix_timestamp()
    }

    #[test]
    fn a_rule_has_summer_time_in_the_north_and_in_the_south() {
        for (rule, moment, hours) in [
            ("UTC0", "2026-07-01T00:00:00Z", 0.0),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-01-15T12:00:00Z", 1.0),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-03-29T00:59:59Z", 1.0),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-03-29T01:00:00Z", 2.0),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-10-25T00:59:59Z", 2.0),
            ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-10-25T01:00:00Z", 1.0),
            ("EST5EDT,M3.2.0,M11.1.0", "2026-03-08T06:59:59Z", -5.0),
            ("EST5EDT,M3.2.0,M11.1.0", "2026-03-08T07:00:00Z", -4.0),
            ("AEST-10AEDT,M10.1.0,M4.1.0/3", "2026-01-15T00:00:00Z", 11.0),
            ("AEST-10AEDT,M10.1.0,M4.1.0/3", "2026-07-15T00:00:00Z", 10.0),
            ("<+0545>-5:45", "2026-07-15T00:00:00Z", 5.75),
        ] {
            let offset = Rule::parse(rule).unwrap().offset(at(moment));
            assert_eq!(f64::from(offset) / 3600.0, hours, "{rule} {moment}");
        }
        for rule in ["", "x", "CET", "CET-1CEST", "CET-1CEST,J60,J300", "CET-1CEST,M13.1.0,M10.5.0"] {
            assert_eq!(Rule::parse(rule), None, "{rule}");
        }
    }

    /// A file with one change, to UTC+2 at 1,000 s, and a rule for the time after it.
    fn zone_file() -> Vec<u8> {
        let block = |times: &[u8], kinds: &[u8]| {
            let mut block = b"TZif2".to_vec();
            block.extend([0; 15]);
            for count in [0_u32, 0, 0, u32::try_from(kinds.len()).unwrap(), 2, 4] {
                block.extend(count.to_be_bytes());
            }
            block.extend(times);
            block.extend(kinds);
            for offset in [3600_i32, 7200] {
                block.extend(offset.to_be_bytes());
                block.extend([0, 0]);
            }
            block.extend(b"ABC\0");
            block
        };
        let mut file = block(&[], &[]);
        file.extend(block(&[1000_i64.to_be_bytes(), 2000_i64.to_be_bytes()].concat(), &[1, 0]));
        file.extend(b"\nEET-3\n");
        file
    }

    #[test]
    fn a_zone_file_has_past_changes_and_a_rule() {
        let file = zone_file();
        let zone = Zone::parse(&file).unwrap();
        assert_eq!([0, 1000, 1999, 2000].map(|at| zone.offset(at) / 3600), [1, 2, 2, 3]);
        for length in 0..file.len() {
            // A truncated file is not read beyond its end.
            let _ = Zone::parse(&file[..length]);
        }
        assert!(Zone::parse(b"not a zone file").is_none());
    }
}
