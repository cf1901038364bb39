//! Draws the figures of a report as SVG pictures on a white card, which suits light and dark pages.

use std::fmt::{Display, Write as _};
use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;

const WIDTH: f64 = 760.0;
const PADDING: f64 = 24.0;
/// Leaves room for the values at the ends of the bars.
const RIGHT: f64 = WIDTH - 90.0;
const TOP: f64 = 102.0;
/// Pixels per character of a wide font.
const CHARACTER: f64 = 7.6;
const BAR: f64 = 20.0;
const GAP: f64 = 16.0;

pub const INK: &str = "#1f2933";
pub const MUTED: &str = "#616e7c";
pub const GRID: &str = "#e4e7eb";
pub const GREY: &str = "#9aa5b1";
pub const BLUE: &str = "#2563eb";
const LIGHT_BLUE: &str = "#a9c4fb";
pub const TEAL: &str = "#0d9488";

/// A side of the comparison: its name in the legend and its colour.
type Series = (&'static str, &'static str);
const FLOOR: Series = ("floor", GREY);
const BRIDGE: Series = ("bridge", BLUE);
const TEXT_ONLY: Series = ("bridge, text-only frames", TEAL);

/// Bars that share a label.
struct Group {
    label: String,
    bars: Vec<(Series, f64)>,
}

/// Draws every plot whose figures the report has. `report` has the form that [`crate::report`] saves.
pub fn write_all(report: &Value, folder: &Path) -> anyhow::Result<()> {
    let figures = Figures(report["figures"].as_array().context("the JSON has no `figures`")?);
    let date = report["date"].as_str().context("the JSON has no `date`")?;
    let calls = figures.groups("calls, ", |_| None);
    let streams = figures.groups("stream events, ", |label| {
        figures.get(&format!("stream events, {}", label.replace("stream", "text-only stream")), "bridge")
    });
    let memory = figures.groups("RSS ", |_| None);
    let plots = [
        ("calls", bars("Calls per second", "More is better.", &calls)),
        ("streams", bars("Stream events per second", "More is better.", &streams)),
        ("memory", bars("Resident memory in MiB", "Less is better.", &memory)),
        (
            "cpu",
            ratios("CPU time per call and per stream event, bridge divided by floor", &figures.cpu_ratios()),
        ),
    ];
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, plot) in plots {
        if let Some(plot) = plot {
            let file = folder.join(format!("performance-{name}.svg"));
            std::fs::write(&file, plot.finish(date))
                .with_context(|| format!("cannot write {}", file.display()))?;
            eprintln!("wrote {}", file.display());
        }
    }
    Ok(())
}

struct Figures<'a>(&'a [Value]);

impl<'a> Figures<'a> {
    /// The figures whose names start with `prefix`, by the rest of the name.
    fn named(&self, prefix: &str) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.0
            .iter()
            .filter_map(move |figure| Some((figure["figure"].as_str()?.strip_prefix(prefix)?, figure)))
    }

    fn get(&self, name: &str, side: &str) -> Option<f64> {
        self.named(name).find(|(rest, _)| rest.is_empty())?.1[side].as_f64()
    }

    fn groups(&self, prefix: &str, text_only: impl Fn(&str) -> Option<f64>) -> Vec<Group> {
        let group = |(label, figure): (&str, &Value)| {
            let values = [
                (FLOOR, figure["floor"].as_f64()),
                (BRIDGE, figure["bridge"].as_f64()),
                (TEXT_ONLY, text_only(label)),
            ];
            let bars = values.into_iter().filter_map(|(series, value)| Some((series, value?)));
            Group { label: label.to_owned(), bars: bars.collect() }
        };
        self.named(prefix).filter(|(label, _)| !label.contains("text-only")).map(group).collect()
    }

    /// Ratios to the floor: label, median and quartiles.
    fn cpu_ratios(&self) -> Vec<(String, [f64; 3])> {
        let calls = self.named("CPU per call, ").filter(|(label, _)| label.ends_with("in flight"));
        let calls = calls.map(|(label, figure)| (format!("calls, {label}"), figure));
        let events = self.named("CPU per event, ").map(|(label, figure)| (label.to_owned(), figure));
        let ratio = |(label, figure): (String, &Value)| {
            let ratio = &figure["bridge_to_floor"];
            let quartile = |index: usize| ratio["quartiles"][index].as_f64();
            Some((label, [ratio["median"].as_f64()?, quartile(0)?, quartile(1)?]))
        };
        calls.chain(events).filter_map(ratio).collect()
    }
}

fn bars(title: &str, note: &str, groups: &[Group]) -> Option<Picture> {
    let all = || groups.iter().flat_map(|group| &group.bars);
    let max = all().map(|(_, value)| *value).reduce(f64::max)?;
    let height: f64 = groups.iter().map(|group| group.bars.len() as f64 * BAR + GAP).sum();
    let mut picture = Picture::new(title, note, groups.iter().map(|group| &group.label), height, max);
    let mut x = PADDING;
    for series in [FLOOR, BRIDGE, TEXT_ONLY] {
        if all().any(|(other, _)| *other == series) {
            picture.rect([x, TOP - 26.0, 12.0, 12.0], series.1);
            picture.text([x + 18.0, TOP - 16.0], "start", INK, series.0);
            x += 40.0 + CHARACTER * series.0.len() as f64;
        }
    }
    let mut y = TOP + GAP / 2.0;
    for group in groups {
        let height = group.bars.len() as f64 * BAR;
        picture.text([PADDING, y + height / 2.0 + 4.0], "start", INK, &group.label);
        for ((_, colour), value) in &group.bars {
            let (start, end) = (picture.left, picture.x(*value));
            picture.rect([start, y + 1.0, end - start, BAR - 2.0], colour);
            picture.text([end + 6.0, y + 14.0], "start", INK, number(*value));
            y += BAR;
        }
        y += GAP;
    }
    Some(picture)
}

fn ratios(title: &str, rows: &[(String, [f64; 3])]) -> Option<Picture> {
    const ROW: f64 = 28.0;
    let max = rows.iter().map(|(_, [_, _, high])| *high).reduce(f64::max)?;
    let note = "Less is better. The mark is the median over the rounds, the band spans the quartiles.";
    let mut picture =
        Picture::new(title, note, rows.iter().map(|(label, _)| label), rows.len() as f64 * ROW + GAP, max);
    let floor = picture.x(1.0);
    picture.line([floor, TOP, floor, picture.bottom], MUTED, 1.5);
    picture.text([floor, TOP - 8.0], "middle", MUTED, "floor");
    for (index, (label, [median, low, high])) in rows.iter().enumerate() {
        let y = TOP + GAP / 2.0 + ROW * (index as f64 + 0.5);
        picture.text([PADDING, y + 4.0], "start", INK, label);
        let (low, high) = (picture.x(*low), picture.x(*high));
        picture.rect([low, y - 6.0, high - low, 12.0], LIGHT_BLUE);
        picture.rect([picture.x(*median) - 2.0, y - 9.0, 4.0, 18.0], BLUE);
        picture.text([RIGHT + 14.0, y + 4.0], "start", INK, format!("{median:.2}"));
    }
    Some(picture)
}

/// An SVG with a title, a note and a horizontal axis from zero.
struct Picture {
    svg: String,
    left: f64,
    bottom: f64,
    max: f64,
}

impl Picture {
    fn new<'a>(
        title: &str,
        note: &str,
        labels: impl Iterator<Item = &'a String>,
        plot_height: f64,
        max: f64,
    ) -> Self {
        let left = PADDING + CHARACTER * labels.map(String::len).max().unwrap_or(0) as f64 + 12.0;
        let mut picture = Self { svg: String::new(), left, bottom: TOP + plot_height, max };
        picture.text([PADDING, 36.0], "start", INK, format!(r#"<tspan class="title">{title}</tspan>"#));
        picture.text([PADDING, 58.0], "start", MUTED, note);
        let step = tick_step(max);
        for tick in (0..).map(|tick| f64::from(tick) * step).take_while(|tick| *tick <= max) {
            let x = picture.x(tick);
            picture.line([x, TOP, x, picture.bottom], GRID, 1.0);
            picture.text([x, picture.bottom + 18.0], "middle", MUTED, number(tick));
        }
        picture
    }

    fn x(&self, value: f64) -> f64 {
        self.left + (RIGHT - self.left) * value / self.max
    }

    fn text(&mut self, [x, y]: [f64; 2], anchor: &str, colour: &str, text: impl Display) {
        let _ = writeln!(
            self.svg,
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{colour}">{text}</text>"#
        );
    }

    fn rect(&mut self, [x, y, width, height]: [f64; 4], colour: &str) {
        let _ = writeln!(
            self.svg,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="2" fill="{colour}"/>"#
        );
    }

    fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], colour: &str, width: f64) {
        let _ = writeln!(
            self.svg,
            r#"<path d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" stroke="{colour}" stroke-width="{width}"/>"#
        );
    }

    fn finish(mut self, date: &str) -> String {
        let height = self.bottom + 52.0;
        self.text([WIDTH - PADDING, height - 14.0], "end", MUTED, format!("scripts/bench, {date}"));
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">
<style>text{{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}.title{{font-size:17px;font-weight:600}}</style>
<rect x="0.5" y="0.5" width="{}" height="{}" rx="8" fill="#ffffff" stroke="#cbd2d9"/>
{}</svg>
"##,
            WIDTH - 1.0,
            height - 1.0,
            self.svg
        )
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that needs at most five steps.
pub fn tick_step(max: f64) -> f64 {
    let power = 10_f64.powf((max / 5.0).log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| max / step <= 5.0)
        .unwrap_or(10.0 * power)
}

/// With thousands separators from 1,000 on, and with one decimal below 100 unless it is a whole number.
pub fn number(value: f64) -> String {
    if value < 100.0 && value.fract() != 0.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}
