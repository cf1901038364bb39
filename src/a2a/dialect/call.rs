//! One HTTP request in the making, before it has an address and credentials.

use std::collections::BTreeMap;

use bytes::Bytes;
use reqwest::Method;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::json;

const JSON: &str = "application/json";

/// What a dialect wants to be sent; the client knows where to.
#[derive(Debug, Clone)]
pub struct HttpCall {
    pub method: Method,
    /// Segments below the address of the interface; none for the address itself.
    pub path: Vec<String>,
    /// The media type of the body.
    pub content_type: &'static str,
    rpc_method: Option<&'static str>,
    params: Option<Box<RawValue>>,
}

impl HttpCall {
    /// A JSON-RPC call at the interface's own address.
    pub(super) fn rpc(method: &'static str, params: &impl Serialize) -> Self {
        Self {
            method: Method::POST,
            path: Vec::new(),
            content_type: JSON,
            rpc_method: Some(method),
            params: Some(raw(params)),
        }
    }

    /// The same JSON-RPC call at an address below the interface's own.
    pub(super) fn below(mut self, path: &[&str]) -> Self {
        self.path = path.iter().map(|segment| (*segment).to_owned()).collect();
        self
    }

    /// A REST call with a body.
    pub(super) fn post(path: Vec<String>, content_type: &'static str, body: &impl Serialize) -> Self {
        Self { method: Method::POST, path, content_type, rpc_method: None, params: Some(raw(body)) }
    }

    /// A REST call without a body.
    pub(super) fn get(path: Vec<String>, content_type: &'static str) -> Self {
        Self { method: Method::GET, path, content_type, rpc_method: None, params: None }
    }

    /// The same call for one tenant of the agent: v1.0 has it in the parameters of JSON-RPC, and
    /// as the first segment of a REST path.
    pub fn for_tenant(mut self, tenant: &str) -> Self {
        if self.rpc_method.is_none() {
            self.path.insert(0, tenant.to_owned());
        } else if let Some(params) = &self.params {
            let fields = serde_json::from_str::<BTreeMap<&str, &RawValue>>(params.get());
            if let Ok(mut fields) = fields {
                let tenant = raw(&tenant);
                fields.insert("tenant", &tenant);
                self.params = Some(raw(&fields));
            }
        }
        self
    }

    /// Changes the media type to the one that everybody knows; false if it is that already.
    pub fn in_plain_json(&mut self) -> bool {
        let was_other = self.content_type != JSON;
        self.content_type = JSON;
        was_other
    }

    /// Makes a GET for a stream a POST, which some have instead; false if it is something else.
    pub fn subscribe_with_post(&mut self) -> bool {
        let is_subscribe = self.path.last().is_some_and(|last| last.ends_with(":subscribe"));
        let was_get = is_subscribe && self.method == Method::GET;
        if was_get {
            self.method = Method::POST;
        }
        was_get
    }

    /// The body, if the call has one.
    pub fn body(&self) -> Option<Bytes> {
        #[derive(Serialize)]
        struct Request<'a> {
            jsonrpc: &'static str,
            // Some agents want UUIDs here.
            id: uuid::Uuid,
            method: &'static str,
            params: &'a RawValue,
        }
        let params = self.params.as_ref()?;
        let Some(method) = self.rpc_method else {
            return Some(Bytes::copy_from_slice(params.get().as_bytes()));
        };
        let request = Request { jsonrpc: "2.0", id: uuid::Uuid::new_v4(), method, params };
        Some(json::to_bytes(&request))
    }
}

fn raw(value: &impl Serialize) -> Box<RawValue> {
    to_raw_value(value).expect("strings, lists and raw JSON always serialize")
}
