//! Queries of the engine's guest to name servers over TCP.

use core::time::Duration;

use super::Uplink;
use crate::context::Context;
use crate::name_queries::AnsweredQuery;
use crate::name_query::QueryClient;

impl Uplink {
    /// Sends queries to name servers over TCP, and hands their answers to the guest. Returns `true` if there are answers for
    /// the next output.
    pub(super) fn carry_name_queries(&mut self, now: Duration) -> bool {
        let mut has_answers = false;
        loop {
            for query in core::mem::take(&mut self.queries) {
                self.name_queries.start(query, &mut context!(self, now));
            }
            let answered = self.name_queries.take_answered();
            if answered.is_empty() {
                return has_answers;
            }
            has_answers = true;
            // An answer makes room for later queries of its connection, which are started in the next round of the loop.
            answered.into_iter().for_each(|answered| self.hand_over_answer(answered, now));
        }
    }

    /// Hands an answer to the guest, as the egress policy has it.
    fn hand_over_answer(&mut self, answered: AnsweredQuery, now: Duration) {
        let AnsweredQuery { query, answer } = answered;
        let answer = self.egress.as_ref().and_then(|egress| {
            egress.answer_over_tcp(query.ends, &query.query, answer, now, &self.counters)
        });
        match (query.client, answer) {
            (QueryClient::Stream(id), answer) => {
                let context = &mut context!(self, now);
                self.tcp.answer_locally(id, answer.as_deref(), context);
            }
            (QueryClient::Datagram(mac), Some(answer)) => {
                self.udp.queue_answer(query.ends, mac, answer);
            }
            (QueryClient::Datagram(_), None) => {}
        }
    }
}
