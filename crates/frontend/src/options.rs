//! Values of the options on lent memory. The help lists them with their meanings.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use ringfence_access::Mode;
use ringfence_access::window::Revocation;
use ringfence_net::staging::TxStaging;

/// Parses the name of a mode. The help lists all modes with their meanings.
pub fn mode_parser() -> impl TypedValueParser<Value = Mode> {
    let named = |mode: Mode| PossibleValue::new(mode.name()).help(mode.meaning());
    PossibleValuesParser::new(Mode::NETWORK.map(named)).try_map(|word| Mode::for_network(&word))
}

/// Parses the choice of staged pages. The help lists the choices with their meanings.
pub fn staging_parser() -> impl TypedValueParser<Value = TxStaging> {
    let named = |staging: TxStaging| PossibleValue::new(staging.name()).help(staging.meaning());
    PossibleValuesParser::new(TxStaging::CHOICES.map(named))
        .try_map(|word| word.parse::<TxStaging>())
}

/// Parses the time of a revocation.
pub fn revocation_parser() -> impl TypedValueParser<Value = Revocation> {
    let named =
        |revocation: Revocation| PossibleValue::new(revocation.name()).help(revocation.meaning());
    PossibleValuesParser::new(Revocation::ALL.map(named)).map(|word| {
        let named = |revocation: &Revocation| revocation.name() == word;
        Revocation::ALL.into_iter().find(named).unwrap_or_default()
    })
}
