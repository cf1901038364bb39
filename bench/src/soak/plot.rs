//! Draws the samples over time: memory, descriptors and latency.

use std::fmt::Write as _;
use std::path::Path;

use super::record::Sample;
use crate::plot::{BLUE, GREY, GRID, INK, MUTED, TEAL, number, tick_step};

const SIZE: [f64; 2] = [760.0, 320.0];
/// The corners of the plot itself.
const LEFT: f64 = 70.0;
const RIGHT: f64 = SIZE[0] - 24.0;
const TOP: f64 = 76.0;
const BOTTOM: f64 = SIZE[1] - 46.0;

type Line = (&'static str, &'static str, fn(&Sample) -> f64);

pub fn write_all(samples: &[Sample], folder: &Path) -> anyhow::Result<()> {
    let plots: [(&str, &str, &[Line]); 3] = [
        ("memory", "Resident memory in MiB", &[("bridge", BLUE, |sample| sample.memory)]),
        (
            "descriptors",
            "Descriptors and threads",
            &[("descriptors", BLUE, |sample| sample.descriptors), ("threads", TEAL, |sample| sample.threads)],
        ),
        (
            "latency",
            "Latency of a call in ms",
            &[("p99", GREY, |sample| sample.p99), ("p50", BLUE, |sample| sample.p50)],
        ),
    ];
    for (name, title, lines) in plots {
        std::fs::write(folder.join(format!("soak-{name}.svg")), draw(title, lines, samples))?;
    }
    Ok(())
}

fn draw(title: &str, lines: &[Line], samples: &[Sample]) -> String {
    let minutes = |sample: &Sample| sample.at.as_secs_f64() / 60.0;
    let end = samples.last().map_or(1.0, minutes).max(0.1);
    let values = lines.iter().flat_map(|(_, _, value)| samples.iter().map(value));
    let max = values.fold(1.0, f64::max);
    let x = |minutes: f64| LEFT + (RIGHT - LEFT) * minutes / end;
    let y = |value: f64| BOTTOM - (BOTTOM - TOP) * value / max;
    let mut svg = String::new();
    let text = |[x, y]: [f64; 2], anchor: &str, colour: &str, text: &str| {
        format!(r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{colour}">{text}</text>"#)
    };
    let mut add = |element: String| {
        let _ = writeln!(svg, "{element}");
    };
    add(text([24.0, 36.0], "start", INK, &format!(r#"<tspan class="title">{title}</tspan>"#)));
    let mut left = 24.0;
    for (name, colour, _) in lines {
        add(format!(r#"<rect x="{left}" y="50" width="12" height="12" rx="2" fill="{colour}"/>"#));
        add(text([left + 18.0, 60.5], "start", INK, name));
        left += 40.0 + 7.6 * name.len() as f64;
    }
    for tick in ticks(max) {
        let at = y(tick);
        add(format!(r#"<path d="M{LEFT} {at:.1}H{RIGHT}" stroke="{GRID}"/>"#));
        add(text([LEFT - 8.0, at + 4.0], "end", MUTED, &number(tick)));
    }
    for tick in ticks(end) {
        add(text([x(tick), BOTTOM + 18.0], "middle", MUTED, &number(tick)));
    }
    add(text([RIGHT, BOTTOM + 36.0], "end", MUTED, "minutes; marks below are faults"));
    for sample in samples.iter().filter(|sample| !sample.events.is_empty()) {
        let (at, events) = (x(minutes(sample)), sample.events.join(", "));
        add(format!(r#"<path d="M{at:.1} {BOTTOM}v5" stroke="{MUTED}"><title>{events}</title></path>"#));
    }
    for (_, colour, value) in lines {
        let points: Vec<_> = samples
            .iter()
            .filter(|sample| value(sample).is_finite())
            .map(|sample| format!("{:.1},{:.1}", x(minutes(sample)), y(value(sample))))
            .collect();
        add(format!(
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="1.5"/>"#,
            points.join(" ")
        ));
    }
    let [width, height] = SIZE;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">
<style>text{{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}.title{{font-size:17px;font-weight:600}}</style>
<rect x="0.5" y="0.5" width="{}" height="{}" rx="8" fill="#ffffff" stroke="#cbd2d9"/>
{svg}</svg>
"##,
        width - 1.0,
        height - 1.0,
    )
}

fn ticks(max: f64) -> impl Iterator<Item = f64> {
    let step = tick_step(max);
    (0..).map(move |tick| f64::from(tick) * step).take_while(move |tick| *tick <= max)
}
