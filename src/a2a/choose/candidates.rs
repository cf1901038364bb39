//! The wires worth trying for a card, in order.

use url::Url;

use crate::a2a::address::AddressPolicy;
use crate::a2a::card::{Card, CardError, Interface, Offer};
use crate::a2a::dialect::Dialect;
use crate::config::{A2aVersion, Binding};

/// One wire at one address.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Candidate {
    pub(super) url: Url,
    pub(super) dialect: Dialect,
    pub(super) tenant: Option<String>,
    /// Whether settings or card name exactly this version, so that v0.1 need not be told from v0.2.
    pub(super) is_certain: bool,
}

impl Candidate {
    pub(super) fn interface(&self, reason: String) -> Interface {
        Interface {
            url: self.url.clone(),
            dialect: self.dialect,
            tenant: self.tenant.clone(),
            reason,
            is_confirmed: false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Plan {
    /// What settings and card say, the preferred one first.
    pub(super) claimed: Vec<Candidate>,
    /// What else an agent may speak at those addresses.
    pub(super) others: Vec<Candidate>,
    /// Who says so, for people.
    pub(super) who_says: &'static str,
}

pub(super) fn plan(
    card: &Card,
    addresses: &AddressPolicy,
    protocol: Option<A2aVersion>,
    binding: Option<Binding>,
) -> Result<Plan, CardError> {
    let is_wanted = |dialect: Dialect| {
        protocol.is_none_or(|protocol| speaks(dialect, protocol))
            && binding.is_none_or(|binding| (binding == Binding::Rest) == dialect.is_rest())
    };
    let offers = card.offers();
    let mut claimed: Vec<Candidate> = Vec::new();
    let mut others: Vec<Candidate> = Vec::new();
    for offer in &offers {
        for (dialect, is_certain) in claims(offer) {
            if is_wanted(dialect) {
                add(&mut claimed, candidate(offer, addresses, dialect, is_certain || protocol.is_some()));
            }
        }
    }
    let is_usable = |offer: &&Offer| Carrier::of(&offer.binding).is_some();
    for offer in offers.iter().filter(is_usable) {
        use Dialect::{V01, V1, V01Paths, V1Rest, V03, V03Ids, V03Rest};
        for dialect in [V1, V03, V03Ids, V01, V01Paths, V1Rest, V03Rest] {
            // A card for JSON-RPC says nothing about where REST would be, and the other way round,
            // unless the user asks for it.
            let is_near = (Carrier::of(&offer.binding) == Some(Carrier::Rest)) == dialect.is_rest();
            if is_wanted(dialect) && (is_near || binding.is_some()) {
                let candidate = candidate(offer, addresses, dialect, protocol.is_some());
                if !has(&claimed, &candidate) {
                    add(&mut others, candidate);
                }
            }
        }
    }
    // The path of the card may be wrong where the configured one is right. A host that the settings
    // let the card name is obeyed: the agent is there even if it wants credentials that it does not get.
    let elsewhere: Vec<_> = claimed
        .iter()
        .filter(|candidate| candidate.url != *addresses.base())
        .filter(|candidate| !addresses.obeys_card(&candidate.url))
        .map(|candidate| Candidate { url: addresses.base().clone(), ..candidate.clone() })
        .collect();
    elsewhere.into_iter().for_each(|candidate| add(&mut others, candidate));
    let is_pinned = protocol.is_some() || binding.is_some();
    if claimed.is_empty() && is_pinned {
        // The user knows better than the card.
        claimed = std::mem::take(&mut others);
    }
    if claimed.is_empty() {
        return Err(CardError::Unsupported(card.offered()));
    }
    let who_says = if is_pinned { "the settings say" } else { "the card says" };
    Ok(Plan { claimed, others, who_says })
}

fn has(list: &[Candidate], candidate: &Candidate) -> bool {
    list.iter().any(|other| other.dialect == candidate.dialect && other.url == candidate.url)
}

fn add(list: &mut Vec<Candidate>, candidate: Candidate) {
    if !has(list, &candidate) {
        list.push(candidate);
    }
}

fn speaks(dialect: Dialect, protocol: A2aVersion) -> bool {
    match protocol {
        A2aVersion::V01 => matches!(dialect, Dialect::V01 | Dialect::V01Paths),
        // The same wire, and cards of v0.2 often do not say their version.
        A2aVersion::V02 => matches!(dialect, Dialect::V02 | Dialect::V03 | Dialect::V03Ids),
        A2aVersion::V03 => matches!(dialect, Dialect::V03 | Dialect::V03Ids | Dialect::V03Rest),
        A2aVersion::V1 => matches!(dialect, Dialect::V1 | Dialect::V1Rest),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    JsonRpc,
    Rest,
}

impl Carrier {
    fn of(binding: &str) -> Option<Self> {
        let letters: String = binding.chars().filter(char::is_ascii_alphanumeric).collect();
        match letters.to_ascii_uppercase().as_str() {
            "JSONRPC" | "JSONRPC20" | "JSONRPC2" | "" => Some(Self::JsonRpc),
            "HTTPJSON" | "REST" | "HTTP" | "HTTPREST" => Some(Self::Rest),
            _ => None,
        }
    }
}

/// The wires that an offer may mean, and whether it says so exactly.
fn claims(offer: &Offer) -> Vec<(Dialect, bool)> {
    use Dialect::{V01, V1, V1Rest, V02, V03, V03Rest};
    let Some(carrier) = Carrier::of(&offer.binding) else {
        return Vec::new();
    };
    let version = offer.version.trim_start_matches(['v', 'V']);
    let is_rest = carrier == Carrier::Rest;
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(0), Some(1)) => vec![(V01, true)],
        (Some(0), Some(2)) if !is_rest => vec![(V02, true)],
        (Some(0), _) => vec![(if is_rest { V03Rest } else { V03 }, true)],
        (Some(1), _) => vec![(if is_rest { V1Rest } else { V1 }, true)],
        _ if offer.is_v1_shape => vec![(if is_rest { V1Rest } else { V1 }, true)],
        _ if is_rest => vec![(V03Rest, true)],
        // Before v0.2.5 cards did not say. With a v0.1 field the older one is likelier.
        _ if offer.is_v01_shape => vec![(V01, false), (V03, false)],
        _ => vec![(V03, false), (V01, false)],
    }
}

fn candidate(offer: &Offer, addresses: &AddressPolicy, dialect: Dialect, is_certain: bool) -> Candidate {
    let mut url = addresses.resolve(&offer.url);
    // The calls of v0.3 begin with `/v1`, which some cards have in the address already.
    if dialect == Dialect::V03Rest
        && let Some(path) = url.path().trim_end_matches('/').strip_suffix("/v1")
    {
        let path = path.to_owned();
        url.set_path(&path);
    }
    Candidate {
        url,
        dialect,
        tenant: offer.tenant.clone().filter(|_| matches!(dialect, Dialect::V1 | Dialect::V1Rest)),
        is_certain,
    }
}
