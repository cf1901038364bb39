//! The figures, the goals, and whether they were reached.

use std::fmt::Write as _;

use serde_json::json;

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

/// One line of the table.
pub struct Row {
    pub figure: String,
    pub unit: &'static str,
    pub floor: Option<f64>,
    pub bridge: f64,
    pub ratio: Option<f64>,
    /// Of the ratio where there is one, else of the bridge's figure.
    pub goal: Option<Goal>,
    /// What the short form fails on: so far off that a busy machine cannot be the reason.
    pub limit: Option<Goal>,
}

impl Row {
    fn judged(&self) -> f64 {
        self.ratio.unwrap_or(self.bridge)
    }
}

#[derive(Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    pub fn add(&mut self, row: Row) {
        eprintln!("  {}", line(&row));
        self.rows.push(row);
    }

    pub fn table(&self) -> String {
        let mut table = String::from(
            "| figure | floor | bridge | unit | ratio | goal | reached |\n| --- | ---: | ---: | --- | ---: | --- | --- |\n",
        );
        for row in &self.rows {
            let _ = writeln!(table, "{}", line(row));
        }
        table
    }

    pub fn json(&self) -> serde_json::Value {
        let row = |row: &Row| {
            json!({
                "figure": row.figure, "unit": row.unit, "floor": row.floor, "bridge": row.bridge, "ratio": row.ratio,
                "goal": row.goal.map(|goal| goal.to_string()),
                "reached": row.goal.map(|goal| goal.holds(row.judged())),
            })
        };
        json!({ "figures": self.rows.iter().map(row).collect::<Vec<_>>() })
    }

    /// What is beyond its limit.
    pub fn far_off(&self) -> Vec<String> {
        let far = |row: &Row| {
            let limit = row.limit.filter(|limit| !limit.holds(row.judged()))?;
            Some(format!("{}: {:.2}, and the limit is {limit}", row.figure, row.judged()))
        };
        self.rows.iter().filter_map(far).collect()
    }
}

fn line(row: &Row) -> String {
    let number = |value: f64| match value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value if value >= 100.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    };
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
    let goal = row.goal.map_or_else(|| "-".to_owned(), |goal| goal.to_string());
    let reached = match row.goal {
        None => "",
        Some(goal) if goal.holds(row.judged()) => "yes",
        Some(_) => "no",
    };
    format!(
        "| {} | {} | {} | {} | {} | {goal} | {reached} |",
        row.figure,
        or_dash(row.floor),
        number(row.bridge),
        row.unit,
        or_dash(row.ratio)
    )
}
