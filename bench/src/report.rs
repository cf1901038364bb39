//! The figures of a run, their goals, and whether the bridge reaches them.

use std::fmt::Write as _;

use serde_json::{Value, json};

#[derive(Clone, Copy)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
        }
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtMost(limit) => write!(f, "<= {limit}"),
            Self::AtLeast(limit) => write!(f, ">= {limit}"),
        }
    }
}

/// Values of one figure, one per round.
pub struct Sample {
    rounds: Vec<f64>,
    sorted: Vec<f64>,
}

impl FromIterator<f64> for Sample {
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        let rounds: Vec<f64> = values.into_iter().collect();
        let mut sorted = rounds.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        Self { rounds, sorted }
    }
}

impl Sample {
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Interpolates between the two nearest values.
    fn quantile(&self, q: f64) -> f64 {
        let Some(last) = self.sorted.len().checked_sub(1) else { return f64::NAN };
        let position = last as f64 * q;
        let (low, high) = (self.sorted[position.floor() as usize], self.sorted[position.ceil() as usize]);
        low + (high - low) * position.fract()
    }

    fn quartiles(&self) -> [f64; 2] {
        [self.quantile(0.25), self.quantile(0.75)]
    }
}

/// One line of the table.
#[derive(Default)]
pub struct Row {
    pub figure: String,
    pub unit: &'static str,
    pub floor: Option<f64>,
    pub bridge: f64,
    pub baseline: Option<f64>,
    /// Bridge divided by floor, in each round.
    pub to_floor: Option<Sample>,
    /// Bridge divided by baseline, in each round.
    pub to_baseline: Option<Sample>,
    /// Applies to the ratio to the floor if there is one, otherwise to the bridge's figure.
    pub goal: Option<Goal>,
    /// Applies to the ratio to the baseline.
    pub baseline_goal: Option<Goal>,
    /// The short run fails beyond this limit, which is loose enough for a busy machine.
    pub limit: Option<Goal>,
}

impl Row {
    /// The value that the goal and the limit apply to.
    fn value(&self) -> f64 {
        self.to_floor.as_ref().map_or(self.bridge, Sample::median)
    }

    /// The goal, and whether the bridge reaches it.
    fn verdict(&self) -> Option<(Goal, bool)> {
        self.goal.map(|goal| (goal, goal.holds(self.value())))
    }

    fn baseline_verdict(&self) -> Option<(Goal, bool)> {
        let (goal, ratio) = (self.baseline_goal?, self.to_baseline.as_ref()?);
        Some((goal, goal.holds(ratio.median())))
    }

    fn json(&self) -> Value {
        let (verdict, baseline_verdict) = (self.verdict(), self.baseline_verdict());
        let goal = |verdict: Option<(Goal, bool)>| verdict.map(|(goal, _)| goal.to_string());
        let reached = |verdict: Option<(Goal, bool)>| verdict.map(|(_, reached)| reached);
        let ratio = |sample: &Sample| json!({ "median": sample.median(), "quartiles": sample.quartiles(), "rounds": sample.rounds });
        json!({
            "figure": self.figure, "unit": self.unit,
            "floor": self.floor, "bridge": self.bridge, "baseline": self.baseline,
            "bridge_to_floor": self.to_floor.as_ref().map(ratio),
            "bridge_to_baseline": self.to_baseline.as_ref().map(ratio),
            "goal": goal(verdict), "reached": reached(verdict),
            "baseline_goal": goal(baseline_verdict), "baseline_reached": reached(baseline_verdict),
        })
    }
}

pub struct Report {
    rows: Vec<Row>,
    has_baseline: bool,
}

impl Report {
    pub fn new(has_baseline: bool) -> Self {
        Self { rows: Vec::new(), has_baseline }
    }

    pub fn add(&mut self, row: Row) {
        eprintln!("  {}", self.line(&row));
        self.rows.push(row);
    }

    pub fn table(&self) -> String {
        let mut table = String::from(if self.has_baseline {
            "| figure | floor | bridge | baseline | unit | bridge/floor | goal | reached | bridge/baseline | goal | reached |\n\
             | --- | ---: | ---: | ---: | --- | ---: | --- | --- | ---: | --- | --- |\n"
        } else {
            "| figure | floor | bridge | unit | bridge/floor | goal | reached |\n\
             | --- | ---: | ---: | --- | ---: | --- | --- |\n"
        });
        for row in &self.rows {
            let _ = writeln!(table, "{}", self.line(row));
        }
        table += "\nFigures are medians over the rounds. The quartiles of each ratio are in parentheses.\n";
        table
    }

    pub fn json(&self) -> Value {
        let date = time::OffsetDateTime::now_utc().date().to_string();
        json!({ "date": date, "figures": self.rows.iter().map(Row::json).collect::<Vec<_>>() })
    }

    /// A description of each row beyond its limit.
    pub fn limits_exceeded(&self) -> Vec<String> {
        let describe = |row: &Row| {
            let limit = row.limit.filter(|limit| !limit.holds(row.value()))?;
            Some(format!("{}: {:.2}, limit {limit}", row.figure, row.value()))
        };
        self.rows.iter().filter_map(describe).collect()
    }

    fn line(&self, row: &Row) -> String {
        let mut cells = vec![row.figure.clone(), number_or_dash(row.floor), number(row.bridge)];
        if self.has_baseline {
            cells.push(number_or_dash(row.baseline));
        }
        cells.push(row.unit.to_owned());
        cells.push(ratio(row.to_floor.as_ref()));
        cells.extend(verdict_cells(row.verdict()));
        if self.has_baseline {
            cells.push(ratio(row.to_baseline.as_ref()));
            cells.extend(verdict_cells(row.baseline_verdict()));
        }
        format!("| {} |", cells.join(" | "))
    }
}

fn number(value: f64) -> String {
    let decimals = match value {
        value if value >= 1000.0 => 0,
        value if value >= 100.0 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

fn number_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), number)
}

/// Three decimals, because the goal for the baseline allows a difference of 0.03.
fn ratio(sample: Option<&Sample>) -> String {
    sample.map_or_else(
        || "-".to_owned(),
        |sample| {
            let [low, high] = sample.quartiles();
            format!("{:.3} ({low:.3}..{high:.3})", sample.median())
        },
    )
}

fn verdict_cells(verdict: Option<(Goal, bool)>) -> [String; 2] {
    match verdict {
        None => ["-".to_owned(), String::new()],
        Some((goal, reached)) => [goal.to_string(), (if reached { "yes" } else { "no" }).to_owned()],
    }
}
