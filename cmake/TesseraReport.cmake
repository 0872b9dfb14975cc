# The page of `tessera report` as strings: tessera/report/page/ and uPlot, which ./dev fetches into build/assets/uplot.
# Without it the program builds, and the verb says what is missing.
function(tessera_report_page)
  set(page ${CMAKE_SOURCE_DIR}/tessera/report/page)
  file(GLOB charts CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/build/assets/uplot/dist/uPlot.*)
  set(parts ${page}/page.html ${page}/page.css ${page}/page.js)
  if(charts)
    set(uplot ${CMAKE_SOURCE_DIR}/build/assets/uplot)
    list(APPEND parts ${uplot}/dist/uPlot.min.css ${uplot}/dist/uPlot.iife.min.js ${uplot}/LICENSE)
  endif()
  set(out ${CMAKE_BINARY_DIR}/generated/page_parts.cc)
  add_custom_command(OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -DOUT=${out} "-DPARTS=${parts}" -P ${CMAKE_SOURCE_DIR}/cmake/embed_page.cmake
    DEPENDS ${parts} ${CMAKE_SOURCE_DIR}/cmake/embed_page.cmake VERBATIM)
  target_sources(tessera_report PRIVATE ${out})
endfunction()
