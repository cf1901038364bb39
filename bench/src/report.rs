//! The figures, the goals, and whether they were reached.

use std::fmt::Write as _;

use serde_json::{Value, json};

/// What a figure is to be.
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

    fn quartiles(&self) -> (f64, f64) {
        (self.quantile(0.25), self.quantile(0.75))
    }
}

/// One line of the table.
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
    /// Applies to the ratio to the floor if there is one, else to the bridge's figure.
    pub goal: Option<Goal>,
    /// Applies to the ratio to the baseline.
    pub baseline_goal: Option<Goal>,
    /// The short form fails beyond it. It is loose enough to hold on a busy machine.
    pub limit: Option<Goal>,
}

impl Row {
    fn judged(&self) -> f64 {
        self.to_floor.as_ref().map_or(self.bridge, Sample::median)
    }

    fn reached(&self) -> Option<bool> {
        self.goal.map(|goal| goal.holds(self.judged()))
    }

    /// The goal of the ratio to the baseline, and whether it is reached.
    fn against_baseline(&self) -> Option<(Goal, bool)> {
        let (goal, ratio) = (self.baseline_goal?, self.to_baseline.as_ref()?);
        Some((goal, goal.holds(ratio.median())))
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
        table += "\nFigures are medians over the rounds; in parentheses the quartiles of the ratio.\n";
        table
    }

    pub fn json(&self) -> Value {
        let row = |row: &Row| {
            json!({
                "figure": row.figure, "unit": row.unit,
                "floor": row.floor, "bridge": row.bridge, "baseline": row.baseline,
                "bridge_to_floor": ratio_json(row.to_floor.as_ref()),
                "bridge_to_baseline": ratio_json(row.to_baseline.as_ref()),
                "goal": row.goal.map(|goal| goal.to_string()),
                "reached": row.reached(),
                "baseline_goal": row.against_baseline().map(|(goal, _)| goal.to_string()),
                "baseline_reached": row.against_baseline().map(|(_, reached)| reached),
            })
        };
        json!({ "figures": self.rows.iter().map(row).collect::<Vec<_>>() })
    }

    /// The rows beyond their limits.
    pub fn far_off(&self) -> Vec<String> {
        let far = |row: &Row| {
            let limit = row.limit.filter(|limit| !limit.holds(row.judged()))?;
            Some(format!("{}: {:.2}, and the limit is {limit}", row.figure, row.judged()))
        };
        self.rows.iter().filter_map(far).collect()
    }

    fn line(&self, row: &Row) -> String {
        let mut cells = vec![row.figure.clone(), number_or_dash(row.floor), number(row.bridge)];
        if self.has_baseline {
            cells.push(number_or_dash(row.baseline));
        }
        cells.push(row.unit.to_owned());
        cells.push(ratio(row.to_floor.as_ref()));
        cells.extend(judgement(row.goal.zip(row.reached())));
        if self.has_baseline {
            cells.push(ratio(row.to_baseline.as_ref()));
            cells.extend(judgement(row.against_baseline()));
        }
        format!("| {} |", cells.join(" | "))
    }
}

fn number(value: f64) -> String {
    match value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value if value >= 100.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

fn number_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), number)
}

/// Three decimals: the goal against the baseline is within three hundredths.
fn ratio(sample: Option<&Sample>) -> String {
    sample.map_or_else(
        || "-".to_owned(),
        |sample| {
            let (low, high) = sample.quartiles();
            format!("{:.3} ({low:.3}..{high:.3})", sample.median())
        },
    )
}

fn ratio_json(sample: Option<&Sample>) -> Option<Value> {
    sample.map(|sample| {
        let (low, high) = sample.quartiles();
        json!({ "median": sample.median(), "quartiles": [low, high], "rounds": sample.rounds })
    })
}

fn judgement(judged: Option<(Goal, bool)>) -> [String; 2] {
    match judged {
        None => ["-".to_owned(), String::new()],
        Some((goal, reached)) => [goal.to_string(), (if reached { "yes" } else { "no" }).to_owned()],
    }
}
