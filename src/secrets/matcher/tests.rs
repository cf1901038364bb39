use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::secrets::Secrets;

const MIN: usize = 8;

fn replaced(forms: &[&str], text: &str) -> String {
    let mut text = text.to_owned();
    Matcher::new(forms.iter().copied().map(str::to_owned), MIN).replace(&mut text, "*");
    text
}

/// The same by definition: one form and one position after the other.
fn by_definition(forms: &[String], text: &str) -> Vec<Range<usize>> {
    let ends = text.match_indices(ELLIPSIS).map(|(at, _)| (at, MIN_TRUNCATED)).chain([(text.len(), MIN)]);
    let truncated = ends.flat_map(|(end, min)| {
        let starts = (0..=end.saturating_sub(min)).filter(move |start| end - start >= min);
        let starts = starts.filter(|start| text.is_char_boundary(*start));
        let is_beginning = move |start: &usize| forms.iter().any(|form| form.starts_with(&text[*start..end]));
        starts.filter(is_beginning).map(move |start| start..end)
    });
    let starts = 0..text.len();
    let whole = starts.filter(|start| text.is_char_boundary(*start)).flat_map(|start| {
        let here = forms.iter().filter(move |form| text[start..].starts_with(form.as_str()));
        here.map(move |form| start..start + form.len())
    });
    let mut all: Vec<_> = truncated.chain(whole).collect();
    all.sort_by_key(|range| range.start);
    let mut united: Vec<Range<usize>> = Vec::new();
    for range in all {
        match united.last_mut().filter(|last| last.end > range.start) {
            Some(last) => last.end = last.end.max(range.end),
            None => united.push(range),
        }
    }
    united
}

proptest! {
    /// Few letters, so that forms overlap, repeat and begin with each other.
    #[test]
    fn finds_what_the_definition_says(
        forms in prop::collection::vec("[abé…]{8,20}", 1..6),
        pieces in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..=20, "[abé…]{0,4}"), 0..12),
    ) {
        let piece = |(form, length, more): &(prop::sample::Index, usize, String)| {
            form.get(&forms).chars().take(*length).collect::<String>() + more
        };
        let text: String = pieces.iter().map(piece).collect();
        let found = Matcher::new(forms.clone(), MIN).find(&text);
        prop_assert_eq!(found, by_definition(&forms, &text), "{}", text);
    }

    /// Whatever surrounds a long form, nothing of it remains.
    #[test]
    fn a_long_form_is_found_whole(
        forms in prop::collection::vec("[abé]{60,200}", 1..4),
        which in any::<prop::sample::Index>(),
        (before, after) in ("[abé]{0,80}", "[abé…]{0,80}"),
    ) {
        let form = which.get(&forms);
        let text = format!("{before}{form}{after}");
        let found = Matcher::new(forms.clone(), MIN).find(&text);
        let is_covered = |range: &Range<usize>| range.start <= before.len() && range.end >= before.len() + form.len();
        prop_assert!(found.iter().any(is_covered), "{:?} in {}", found, text);
        prop_assert!(found.iter().all(|range| text.get(range.clone()).is_some()));
    }
}

#[test]
fn overlapping_forms_are_replaced_together() {
    assert_eq!(replaced(&["abcdefgh", "defghijklm"], "-abcdefghijklm-"), "-*-");
    assert_eq!(replaced(&["abababab"], "-ababababab-"), "-*-");
    assert_eq!(replaced(&["abcdefgh"], "abcdefghabcdefgh"), "**");
}

#[test]
fn a_long_form_is_replaced_up_to_the_first_difference() {
    let long = format!("{}éf", "0123456789".repeat(8));
    assert_eq!(replaced(&[&long], &format!("a {long} b")), "a * b");
    assert_eq!(replaced(&[&long], &format!("a {}è b", &long[..80])), "a *è b");
    assert_eq!(replaced(&[&long], &format!("a {}… b", &long[..70])), "a *… b");
    // Less than the head is not enough in the middle of a text.
    let short = format!("a {} b", &long[..60]);
    assert_eq!(replaced(&[&long], &short), short);
}

#[test]
fn a_form_that_begins_within_another_is_replaced_to_its_end() {
    let shared = "eyJhbGciOiJSUzI1NiJ9".repeat(5);
    let (one, other) = (format!("Bearer {shared}.one-signature"), format!("{shared}.second-signature"));
    assert_eq!(replaced(&[&one, &other], &format!("<Bearer {other}>")), "<*>");
}

/// A key of 50 lines, which has more than 500 forms.
fn pem_key() -> String {
    let mut random = fastrand::Rng::with_seed(7);
    let mut line = || std::iter::repeat_with(|| random.alphanumeric()).take(64).collect::<String>();
    (0..50).map(|_| line() + "\n").collect()
}

/// The CPU time of this thread, which does not depend on the load of the machine.
fn cpu_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

/// The least time of several attempts.
fn time_of(mut work: impl FnMut()) -> Duration {
    let attempt = |()| {
        let begin = cpu_time();
        work();
        cpu_time().saturating_sub(begin)
    };
    std::iter::repeat_n((), 3).map(attempt).min().unwrap()
}

#[test]
fn the_time_is_linear_in_the_text_and_independent_of_the_number_of_forms() {
    let key = pem_key();
    let secrets = |value: &str| Secrets::new([value.to_owned().into()]);
    // With what is expensive to look at: truncations, and beginnings of a form.
    let line = &key[..60];
    let text = |bytes: usize| format!("{line} and so on… {}…", &line[..5]).repeat(bytes / 80);
    let time = |secrets: &Secrets, text: &str| {
        time_of(|| {
            let mut text = text.to_owned();
            secrets.redact(&mut text);
            assert!(text.len() > 1000);
        })
    };
    let (small, large) = (text(100_000), text(400_000));
    let many = secrets(&key);
    let (base, longer) = (time(&many, &small), time(&many, &large));
    assert!(longer < base * 16, "{base:?}, and {longer:?} for four times the text");
    let single = time(&secrets(line), &large);
    assert!(longer < single * 20, "{single:?} for one secret, {longer:?} for a key");
}

#[test]
fn a_large_text_with_a_key_takes_as_long_as_with_a_short_secret() {
    let text = "some words, and … ".repeat(15_000_000 / 20);
    let time = |value: &str| {
        let secrets = Secrets::new([value.to_owned().into()]);
        let begin = cpu_time();
        let mut redacted = text.clone();
        secrets.redact(&mut redacted);
        assert!(redacted == text);
        cpu_time().saturating_sub(begin)
    };
    let (short, key) = (time("t0ps3cret"), time(&pem_key()));
    assert!(key < short * 20, "{short:?} for a short secret, {key:?} for a key");
}

/// An issuer of tokens chooses them. This one repeats itself, and has many continuations.
#[test]
fn a_form_that_repeats_itself_is_compared_once() {
    let forms: Vec<String> = (0..8).map(|number| format!("{}{number}", "a".repeat(20_000))).collect();
    let mut text = "a".repeat(1_000_000);
    Matcher::new(forms, MIN).replace(&mut text, "*");
    assert_eq!(text, "*");
}

#[test]
fn memory_does_not_grow_with_the_length_of_a_form() {
    let matcher = |length: usize| {
        Matcher::new((b'a'..=b'p').map(|first| char::from(first).to_string().repeat(length)), MIN)
    };
    let size = |matcher: &Matcher| {
        matcher.automaton.memory_usage() + matcher.depths.len() * size_of::<(StateID, usize)>()
    };
    assert_eq!(size(&matcher(MAX_HEAD)), size(&matcher(10_000)));
    assert!(size(&matcher(10_000)) < 16 * MAX_HEAD * 64, "{}", size(&matcher(10_000)));
}
